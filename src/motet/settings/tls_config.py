"""The settings of TLS, declared in the manner of `motet.settings.server_config`."""

from dataclasses import dataclass

from motet.settings.declaration import setting


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Certificates of a server, and the certificates that it accepts."""

    ssl_certfile: str | None = setting(
        None,
        "File with the server's certificate and its chain (PEM). The server then accepts only HTTPS.",
        unit="file",
        unset="HTTP without TLS",
    )
    ssl_keyfile: str | None = setting(
        None,
        "File with the private key of --ssl-certfile.",
        unit="file",
        unset="the key in the file of the certificate",
    )
    ssl_ca_certs: str | None = setting(
        None,
        "File with CA certificates. Clients without a certificate from one of these CAs reach only the routes for "
        "health probes.",
        unit="file",
        unset="clients need no certificate",
    )
    worker_ca_file: str | None = setting(
        None,
        "File with the CA certificates of workers and prefill servers at https URLs.",
        unit="file",
        unset="the system's certificates",
    )
    worker_cert_file: str | None = setting(
        None,
        "File with the certificate that this server shows to workers and prefill servers at https URLs.",
        unit="file",
        unset="the certificate of --ssl-certfile",
    )
    worker_key_file: str | None = setting(
        None,
        "File with the private key of --worker-cert-file.",
        unit="file",
        unset="the key in the file of the certificate",
    )
