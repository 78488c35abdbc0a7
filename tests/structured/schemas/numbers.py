"""Numbers and their bounds."""

from tests.structured.schemas.case import SchemaCase, of_value


def case(name: str, good: tuple[str, ...], bad: tuple[str, ...], kind: str = "number", **bounds: object) -> SchemaCase:
    return of_value(name, {"type": kind, **bounds}, good, bad, message="How many legs does a cat have?")


CASES = (
    case("integer", ("0", "-7", "12345678901"), ("1.5", '"1"', "01", "+1"), "integer"),
    case("number", ("0", "-7.25", "1e3", "1.5E-2"), (".5", "1.", "NaN", "0x1", "Infinity"), "number"),
    case("integer_from_1_to_12", ("1", "12"), ("0", "13", "120"), "integer", minimum=1, maximum=12),
    case("integer_of_at_least_18", ("18", "99", "100"), ("17", "-18", "1"), "integer", minimum=18),
    case("integer_of_at_most_minus_5", ("-5", "-50"), ("-4", "5", "0"), "integer", maximum=-5),
    case("integer_around_zero", ("-3", "0", "3"), ("-4", "4"), "integer", exclusiveMinimum=-4, exclusiveMaximum=4),
    case(
        "integer_in_thousands",
        ("1000", "98765", "2147483647"),
        ("999", "2147483648"),
        "integer",
        minimum=1000,
        maximum=2147483647,
    ),
    case("multiple_of_5", ("0", "5", "-15", "100"), ("1", "52"), "integer", multipleOf=5),
    case(
        "multiple_of_7_between_bounds", ("14", "63"), ("7", "15", "70"), "integer", multipleOf=7, minimum=10, maximum=69
    ),
    case("number_from_0_to_1", ("0", "0.25", "1", "1.0"), ("-0.1", "1.01", "2"), minimum=0, maximum=1),
    case(
        "number_between_bounds_that_are_left_out",
        ("0.1", "1.25"),
        ("0", "0.0", "1.5", "1.51"),
        exclusiveMinimum=0,
        exclusiveMaximum=1.5,
    ),
    case("number_of_at_least_minus_1_and_a_half", ("-1.5", "-1.25", "0", "70"), ("-1.51", "-2"), minimum=-1.5),
    # Written with as many decimal places as the step has, or none: 1.5 is refused.
    case("multiple_of_a_quarter", ("0.25", "1.50", "3"), ("0.3", "1.26"), multipleOf=0.25, minimum=0, maximum=100),
)
