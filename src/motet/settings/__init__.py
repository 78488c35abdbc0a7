"""Settings and the sources of their values: default < file < environment < flag. Resolved once, checked, then frozen.

    server_config, engine_config, gateway_config, ray_config     declare every setting, once
    declaration     a declaration, and all that is derived from it: flag, variable, range, help
    record          a resolved value with its source; the records that the parts of a server get
    resolve         reads the sources in order of precedence, and names the source of a wrong value
    rules           forbidden combinations, and defaults that depend on other settings
    named_worker    workers: their URLs, roles and kinds, and Ray resources
    server_url      the URL of a server: checked, and without /v1
    named_adapter   LoRA adapters: their names and folders
    parsed_values   JSON objects, and numbers for API keys

A setting has one name in three forms: `max_num_seqs` in a TOML file, `MOTET_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. Unknown names and impossible values are refused before any process starts.
"""
