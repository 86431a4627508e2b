"""Search for settings of one's own: a grid, grids one after the other, random draws, or Optuna's TPE."""
