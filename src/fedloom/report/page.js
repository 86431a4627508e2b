"use strict";
const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, PB: 1e15, s: 1, min: 60, h: 3600 };

function value(cell) {  // the number in a cell, with bytes and times in one unit; NaN for words
  const text = cell.dataset.value || cell.firstChild.textContent;
  const parts = [...text.replace(/\u2212/g, "-").replace(/,/g, "").matchAll(/([+-]?\d+(?:\.\d+)?)(?:\s*([a-zA-Z]+))?/g)];
  if (!parts.length) return NaN;
  if (!(parts[0][2] in UNITS)) return parseFloat(parts[0][1]);
  return parts.reduce((sum, part) => sum + parseFloat(part[1]) * (UNITS[part[2]] || 0), 0);
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], first = [...body.rows];
  if (first.length < 2 || first.some((row) => row.cells.length !== heads.length)) return;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const numbers = head.classList.contains("number"), start = numbers ? "descending" : "ascending";
      const order = before === null ? start : before !== start ? null : numbers ? "ascending" : "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      let rows = first;
      if (order) {
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        rows = first.map((row) => [numbers ? value(row.cells[column]) : row.cells[column].textContent, row]);
        rows.sort(([a], [b]) => !numbers ? sign * a.localeCompare(b, "en", { numeric: true })
          : isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) : sign * (a - b));
        rows = rows.map(([, row]) => row);
      }
      body.append(...rows);
    });
  });
}

function filtered(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 10) return;
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter " + rows.length + " rows";
  input.setAttribute("aria-label", "Filter the rows: " + table.getAttribute("aria-label"));
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    rows.forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
  });
  table.parentElement.before(input);
}

function labeled(table) {  // on a narrow screen each row becomes a block of lines: heading, value
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.label = heads[i]; });
  table.classList.add("blocks");
}

function hovered(svg) {
  const { names, points, across, top, bottom, left, right } = JSON.parse(svg.dataset.hover);
  const guide = document.createElementNS("http://www.w3.org/2000/svg", "path"), tip = document.createElement("div");
  guide.setAttribute("class", "guide");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  svg.append(guide);
  svg.parentElement.after(tip);
  const hide = () => { tip.hidden = true; guide.setAttribute("d", ""); };
  const show = (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal, scale = view.width / box.width;
    const at = across ? (event.clientX - box.left) * scale : (event.clientY - box.top) * scale;
    const point = points.reduce((best, one) => Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
    guide.setAttribute("d", across ? `M${point[0]} ${top}V${bottom}` : `M${left} ${point[0]}H${right}`);
    const head = document.createElement("strong");
    head.textContent = point[1];
    tip.replaceChildren(head, ...point[2].map(([which, text]) => {
      const line = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = names[which][1];
      line.append(mark, names[which][0] + ": " + text);
      return line;
    }));
    tip.hidden = false;
    const figure = tip.parentElement.getBoundingClientRect(), x = across ? box.left + point[0] / scale : event.clientX;
    const room = figure.width - tip.offsetWidth - 8, wished = x - figure.left + 14;
    tip.style.left = Math.max(8, wished > room ? x - figure.left - tip.offsetWidth - 14 : wished) + "px";
    tip.style.top = event.clientY - figure.top - tip.offsetHeight - 12 + "px";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
  hide();
}

for (const table of document.querySelectorAll("table")) {
  labeled(table);
  sortable(table);
  filtered(table);
}
document.querySelectorAll("svg[data-hover]").forEach(hovered);
