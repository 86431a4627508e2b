"""The rules of the house, read off the imports themselves (docs/architecture.md draws them)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fedloom import methods
from fedloom.core.method import Method, MethodConfig
from fedloom.core.party import Party

SOURCE = Path(__file__).parents[1] / "src" / "fedloom"

# Each folder, and what of fedloom it may import beside itself. The loose files stand on top of all
# but `cli`.
ALLOWED = {
    "core": set(),
    "support": {"core"},
    "data": {"core", "support"},
    "models": {"core", "support", "trees"},
    "protect": {"core"},
    "trees": set(),
    "engines": {"core"},
    "methods": {"core", "protect", "trees"},
    "experiment": {
        "core",
        "support",
        "protect",
        "data",
        "models",
        "methods",
        "engines",
        "trees",
    },
    "remote": {
        "core",
        "support",
        "protect",
        "data",
        "models",
        "methods",
        "engines",
        "experiment",
    },
    "report": {"core", "support", "data", "experiment"},
    "sweep": {"core", "support", "experiment", "report"},
    "deploy": {"core", "support", "data", "models", "methods", "experiment", "trees"},
    "cli": {
        "api",
        "core",
        "support",
        "data",
        "models",
        "methods",
        "experiment",
        "remote",
        "report",
        "sweep",
        "deploy",
    },
}
STEPS = ("config", "plan", "run", "pool", "trial")
"""The folders of `experiment`, each of which imports only those before it."""
TOP = {"__init__", "__main__", "_version", "api", "estimators"}
LOOSE = {"_version"}  # what every folder may import beside


def imports(file: Path) -> set[str]:
    """Every module of fedloom that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            names = [node.module]
            if node.module == "fedloom":
                names = [f"fedloom.{a.name}" for a in node.names]
        found |= {n for n in names if n.split(".")[0] == "fedloom"}
    return found


FILES = sorted(SOURCE.rglob("*.py"))
PAPERS = sorted((SOURCE.parents[1] / "papers" / "fedloom_papers").rglob("*.py"))
"""A package of its own on top of fedloom."""


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_go_only_where_they_may(file: Path) -> None:
    own = file.relative_to(SOURCE).with_suffix("").parts[0]
    if own in TOP:
        return
    for module in imports(file):
        part = module.split(".")[1] if "." in module else "__init__"
        assert part in ALLOWED[own] | LOOSE | {own}, f"{own} must not import {module}"


def test_each_step_of_an_experiment_imports_only_those_before_it() -> None:
    folder = SOURCE / "experiment"
    assert {f.name for f in folder.iterdir() if f.is_dir() and f.name != "__pycache__"} == {*STEPS}
    for number, step in enumerate(STEPS):
        for file in (folder / step).rglob("*.py"):
            later = {f"fedloom.experiment.{other}" for other in STEPS[number + 1 :]}
            found = {".".join(module.split(".")[:3]) for module in imports(file)}
            assert not found & later, f"{file.relative_to(SOURCE)} must not import {found & later}"


def test_the_library_does_not_know_the_papers() -> None:
    assert PAPERS and not [file for file in FILES if "fedloom_papers" in file.read_text()]


def test_the_table_has_no_circle_and_names_every_folder() -> None:
    folders = {f.relative_to(SOURCE).parts[0] for f in FILES if f.parent != SOURCE}
    assert folders == set(ALLOWED)
    assert {f.stem for f in FILES if f.parent == SOURCE} == TOP
    TopologicalSorter(ALLOWED).prepare()  # raises CycleError


def test_no_module_imports_itself_through_others() -> None:
    """Also not inside functions; imports for types alone do not count."""
    modules = {
        ".".join(("fedloom", *f.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): f
        for f in FILES
    }
    graph: dict[str, set[str]] = {name: set() for name in modules}

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.module in modules:
                paths = {f"{child.module}.{a.name}" for a in child.names}
                graph[name] |= (paths & modules.keys()) or {child.module}
            walk(child, name)

    for name, file in modules.items():
        walk(ast.parse(file.read_text()), name)
        graph[name].discard(name)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def classes(file: Path) -> list[ast.ClassDef]:
    """Every class that a file defines."""
    return [
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    ]


def test_folders_and_loose_files_are_few() -> None:
    folders = [f for f in SOURCE.iterdir() if f.is_dir() and f.name != "__pycache__"]
    assert len(folders) <= 15 and len(TOP) <= 6


def test_no_class_name_means_two_things() -> None:
    where: dict[str, list[str]] = {}
    for file in [*FILES, *PAPERS]:
        for found in classes(file):
            where.setdefault(found.name, []).append(str(file))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_a_method_page_imports_neither_engines_nor_experiments_nor_touches_files_or_clocks() -> (
    None
):
    pages = sorted((SOURCE / "methods").rglob("*.py"))
    assert len(pages) >= 3
    forbidden = {
        "os",
        "sys",
        "time",
        "random",
        "logging",
        "multiprocessing",
        "threading",
        "socket",
        "pickle",
    }
    for page in pages:
        if page.name == "__init__.py":
            continue
        tree = ast.parse(page.read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in forbidden, f"{page.name} imports {name}"
                assert not re.match(r"fedloom\.(engines|experiment|data|report)", name), (
                    f"{page.name}: {name}"
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"print", "open"}, f"{page.name} calls {node.func.id}"


def test_nothing_can_run_code_from_a_message_or_file() -> None:
    """No pickle, and nothing that uses it: torch.load, allow_pickle, eval."""
    for file in [*FILES, *PAPERS]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & set(names), file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "torch.save", "eval", "exec", "joblib.load"}, (
                    f"{file}: {called}"
                )
                for keyword in node.keywords:
                    unsafe = keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True)
                    assert not unsafe and keyword.arg != "trust_remote_code", file


def test_importing_fedloom_is_cheap_and_help_needs_no_torch() -> None:
    code = (
        "import sys, fedloom, fedloom.cli.app;"
        "print([m for m in ('torch', 'sklearn', 'matplotlib', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert out.strip() == "[]"


@pytest.mark.slow
def test_a_run_imports_nothing_it_does_not_need() -> None:
    """What is slow to import must not stand before the first round."""
    code = (
        "import sys, fedloom; fedloom.run('fedal', rounds=1, models={'pool': ['mlp']});"
        "slow = ('matplotlib', 'datasets', 'pandas', 'scipy', 'sklearn', 'sympy', 'torch._dynamo');"
        "print([m for m in slow if m in sys.modules])"
    )
    for _ in range(2):  # the first reads the digits through scikit-learn, the second from the cache
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    assert out.strip() == "[]"


HOOKS = {"setup", "prepare", "broadcast", "infer", "findings", "test_logits"}
"""Methods of `Party` that a page may override."""


@pytest.mark.parametrize("method", methods.registry().values(), ids=lambda m: m.name)
def test_a_page_stands_on_the_core_alone(method: Method) -> None:
    """Its parties derive from Party, with at most one class between; they are final, and override
    nothing but hooks; its config has one base.
    """
    concrete = {
        name
        for name, value in vars(Party).items()
        if callable(value) or isinstance(value, property)
    }
    for kind in filter(None, (method.client, method.server, method.black_box)):
        *shared, last = [c for c in kind.__mro__ if issubclass(c, Party)][1:]
        assert last is Party and len(shared) <= 1, kind
        assert "__final__" in vars(kind), f"{kind.__name__} needs @final"
        for base in shared:
            assert not base.ROLE and vars(base).keys() & concrete <= HOOKS | {"state_names"}, base
        assert kind.ROLE, (
            f"{kind.__name__} needs a ROLE, which state_sha256 and the ledger depend on"
        )
        assert vars(kind).keys() & concrete <= HOOKS, kind
    assert len([c for c in method.config.__mro__ if issubclass(c, MethodConfig)]) <= 3, (
        method.config
    )


def read_with(module: str) -> dict[str, str]:
    """The text of a module, and of all that it imports from methods and protections, and so on."""
    found: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        path = SOURCE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in found or not path.is_file():
            continue
        found[name] = path.read_text()
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.module:
                both = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
                left += [m for m in both if m.startswith(("fedloom.methods.", "fedloom.protect."))]
    return found


def test_fedavg_reads_at_most_400_lines_with_fifteen_concepts() -> None:
    """Its page and everything that it imports from methods and protections, with docstrings and
    without blank lines. Concepts: what they take from the core, but errors, and what a party
    declares.
    """
    read = read_with("fedloom.methods.averaging.fedavg")
    assert {*read} == {
        "fedloom.methods.averaging.fedavg",
        "fedloom.methods.steps",
        "fedloom.methods.settings",
    }
    texts = [*read.values()]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 400
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    core = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "fedloom.core.page"
    ]
    taken = {name.name for node in core for name in node.names if not name.name.endswith("Error")}
    declared = {
        name.id for name in nodes if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    assert len(taken | declared & {"ROLE", "STATE", "CALLS", "MEANS"}) <= 15


FACTLESS = ("remote/node/terms.py", "remote/node/limits.py", "deploy/", "experiment/trial/")
"""What knows no method: all that it asks a method stands on the method's page."""
WORDS = {
    "alone", "columns", "federated", "missing", "mix", "own", "owners", "shift", "threshold",
    "bins", "time", "mode", "average", "pairs", "variances", "predict", "beta", "own_weight",
}  # fmt: skip
"""Names of methods and fields that are plain words of these files, too."""
LEFT = {"deploy/tables.py": 7, "deploy/table_network.py": 1}
"""Files there that still import pages of methods, with how many imports."""


STILL = {
    "core": 75,
    "experiment": 50,
    "data": 20,
    "report": 16,
    "cli": 14,
    "engines": 8,
    "protect": 7,
    "__init__.py": 4,
    "estimators.py": 3,
    "remote": 3,
    "sweep": 3,
}
"""How often each folder still names one, or has a word that is one: to become fewer."""


def knowing(text: str, names: set[str], fields: set[str]) -> list[str]:
    """Where a source names a method or a field of the config of one: as a whole string, as an
    attribute of a config, as `params.FIELD` in a text, or as a key of what is a config's.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in fields and of in {"cfg", "setting", "settings(candidate)"}:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            said = set(re.findall(r"params\.(\w+)", node.value)) & fields
            if node.value in (names | fields) - WORDS or said:
                found.append(node.value)
        of_config: list[ast.expr] = []
        if isinstance(node, ast.Call):
            reads = ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}
            of_config = [node.func, *node.args[:1]] if reads else [node.func]
        elif isinstance(node, ast.Subscript):
            of_config = [node.value]
        elif isinstance(node, ast.Compare):
            of_config = [node.left, *node.comparators]
        if any(
            re.search(r"\b(cfg|params|model_fields|fixed)\b", ast.unparse(x)) for x in of_config
        ):
            found += [
                child.value
                for child in ast.walk(node)
                if isinstance(child, ast.Constant) and child.value in fields
            ]
    return found


METHODS = {*methods.registry()}
USUAL = {"epochs", "batch_size", "clients_per_round", "batchnorm", "lr", "rate", "momentum"}
"""Fields that `MethodConfig` itself knows, of every page that has them."""
FIELDS = {field for one in methods.registry().values() for field in one.config.model_fields} - USUAL
FREE = [file for file in FILES if str(file.relative_to(SOURCE)).startswith(FACTLESS)]


@pytest.mark.parametrize("file", FREE, ids=lambda f: str(f.relative_to(SOURCE)))
def test_facts_of_a_method_stand_on_its_page(file: Path) -> None:
    assert knowing(file.read_text(), METHODS, FIELDS) == []
    pages = {module for module in imports(file) if module.count(".") > 2 and ".methods." in module}
    assert len(pages) <= LEFT.get(str(file.relative_to(SOURCE)), 0), pages


@pytest.mark.parametrize(
    "text",
    [
        'if method.name in ("fens", "stats"): pass',
        'x = getattr(cfg, "mix", 0)',
        "x = party.cfg.kinds",
        'x = "own" in method.config.model_fields',
        'params["own"] = []',
        'x = "set params.trust_bits, such as 4"',
        'cfg.model_copy(update={"owners": "none"})',
        'SETTINGS = ("trust_neighbours",)',
    ],
)
def test_a_name_of_a_method_or_field_is_found_however_it_is_written(text: str) -> None:
    assert knowing(text, METHODS, FIELDS)


def test_other_folders_name_no_more_methods_and_fields_than_before() -> None:
    found: Counter[str] = Counter()
    for file in FILES:
        folder = file.relative_to(SOURCE).parts[0]
        if folder != "methods":
            found[folder] += len(knowing(file.read_text(), METHODS, FIELDS))
    assert {name: n for name, n in found.items() if n > STILL.get(name, 0)} == {}
