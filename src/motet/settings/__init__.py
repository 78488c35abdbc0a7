"""The sources of a setting's value: default < file < environment < flag. Resolved once, checked, then frozen.

    motet.settings.server_config             the declarations: every setting, once
    settings.declaration     a declaration, and all that is derived from it: flag, variable, range, help
    settings.resolve         reads the sources, lays them over each other, and names the one to blame
    settings.rules           forbidden combinations, and defaults that depend on other settings
    settings.named_worker    values with parts: workers, their roles and keys, Ray's resources

A name is the same everywhere, in different forms: `max_num_seqs` in a TOML file, `MOTET_MAX_NUM_SEQS` in the
environment, `--max-num-seqs` on the command line. Unknown names and impossible values are refused before any process
starts.
"""
