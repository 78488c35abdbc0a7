"""Where the value of a setting comes from: default < file < environment < flag. Resolved once, checked, then frozen.

The settings are the fields of the records in `motet.config`: of the model, the engine, the cell and the server. A name
is the same everywhere but for its dress: `max_num_seqs` in a TOML file, `MOTET_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. Unknown names and impossible values are refused here, before any process starts.
"""

from motet.settings.record import Setting, Settings
from motet.settings.resolve import resolve_settings

__all__ = ["Setting", "Settings", "resolve_settings"]
