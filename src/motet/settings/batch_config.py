"""The settings of OpenAI's Files and Batch API, declared in the manner of `motet.settings.server_config`."""

from dataclasses import dataclass

from motet.settings.declaration import setting

DAY_S = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Where files and batches are stored, and their limits for each API key; without keys, for all clients together."""

    batch_dir: str | None = setting(
        None,
        "Folder for the files and batches of /v1/files and /v1/batches. Only one server at a time can use it.",
        unit="folder",
        unset="the routes are closed",
    )
    batch_concurrency: int = setting(
        16, "Maximum number of lines of batches that run at a time; requests of clients start before them.", minimum=1
    )
    batch_max_file_bytes: int = setting(
        200 * 2**20, "Maximum size of an uploaded file.", unit="bytes", minimum=1, maximum=2**40
    )
    batch_max_bytes: int = setting(
        4 * 2**30, "Maximum size of all files of an API key, with the results of its batches.", unit="bytes", minimum=1
    )
    batch_max_files: int = setting(10_000, "Maximum number of files of an API key.", minimum=1)
    batch_max_open: int = setting(100, "Maximum number of unfinished batches of an API key.", minimum=1)
    batch_max_lines: int = setting(50_000, "Maximum number of lines of a batch.", minimum=1)
    batch_keep_days: int = setting(
        30, "Days after which files and ended batches are removed.", unit="days", minimum=1, maximum=3650
    )
