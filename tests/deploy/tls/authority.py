"""A certificate authority with certificates for servers and clients, made with the openssl command."""

import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet.settings.tls_config import TlsConfig

NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Authority:
    """One certificate authority; its files are in one folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        openssl(f"req -x509 {NEW_KEY} -days 2 -subj /CN={name} -keyout {self._key} -out {self.file}")

    def sign(self, name: str, *, days: int = 2) -> tuple[Path, Path]:
        """Returns the files of a new certificate for 127.0.0.1 and of its key. A file of this name is replaced."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        openssl(
            f"req -x509 {NEW_KEY} -CA {self.file} -CAkey {self._key} -days {days} -subj /CN={name} "
            f"-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE "
            f"-keyout {key} -out {certificate}"
        )
        return certificate, key

    def config(self, name: str = "server", **settings: Path | str | None) -> TlsConfig:
        """Returns the settings of a server with a new certificate, which trusts workers of this authority."""
        certificate, key = self.sign(name)
        config = TlsConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key), worker_ca_file=str(self.file))
        changed: dict[str, Any] = {field: value and str(value) for field, value in settings.items()}
        return replace(config, **changed)

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Returns the context of a client that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.file))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context


def openssl(arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)
