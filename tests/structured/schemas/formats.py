"""Strings in the formats that are enforced."""

from tests.structured.schemas.case import SchemaCase, of_value


def case(name: str, ask: str, good: tuple[str, ...], bad: tuple[str, ...], **more: object) -> SchemaCase:
    texts, others = (tuple(f'"{text}"' for text in texts) for texts in (good, bad))
    return of_value(
        f"format_{name.replace('-', '_')}", {"type": "string", "format": name, **more}, texts, others, message=ask
    )


CASES = (
    case("date", "On which day?", ("2026-02-28", "2024-02-29"), ("2026-13-01", "2026-1-1", "2026-04-31", "today")),
    case(
        "date-time",
        "When exactly?",
        ("2026-02-28T12:00:00Z", "2026-02-28T12:00:00.25+01:00"),
        ("2026-02-28", "2026-02-28T25:00:00Z", "2026-02-28T12:00:00"),
    ),
    case("time", "At what time?", ("12:30:00Z", "23:59:59+02:00"), ("24:00:00Z", "12:30", "12:60:00Z")),
    case("duration", "For how long?", ("P1D", "PT1H30M", "P2W"), ("1 day", "P", "PT1D")),
    case("email", "Your address?", ("ada@example.org", "a.b@c.de"), ("ada", "ada.example.org"), maxLength=40),
    case(
        "uuid",
        "An id?",
        ("123e4567-e89b-12d3-a456-426614174000",),
        ("123e4567", "123e4567-e89b-12d3-a456-42661417400g"),
    ),
    case("ipv4", "Which address?", ("10.0.0.1", "255.255.255.255"), ("10.0.0", "10.0.0.256", "::1")),
    case("ipv6", "Which address?", ("::1", "2001:db8::8:800:200c:417a"), ("10.0.0.1", "2001:db8::1::2", "12345::")),
    case(
        "uri",
        "Which page?",
        ("https://example.org/a?b=c#d", "mailto:a@b.de"),
        ("example", "/a/b", "http://a b"),
        maxLength=60,
    ),
    case("hostname", "Which host?", ("example.org", "a-b.c1"), ("-a.org", "a_b.org", "a..b"), maxLength=40),
)
