"""What several folders above `core` use: files and TOML, lines of a log, commands and presets of
other packages. It imports nothing but the errors of `core`.
"""
