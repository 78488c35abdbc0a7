"""How many choices and prompts one request may have."""

from dataclasses import dataclass

from motet.config import ServerConfig
from motet.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Counts:
    num_prompts: int
    num_choices: int
    """Of each prompt."""
    most_choices: int
    """That one prompt may have."""
    count_param: str = "n"
    """The field that said how many choices."""
    prompt_param: str
    """The field the prompts came in."""

    def check(self, config: ServerConfig) -> None:
        """Raises RequestError."""
        if self.num_choices > self.most_choices:
            raise RequestError(
                f"Invalid '{self.count_param}': integer above maximum value. Expected a value <= {self.most_choices}, "
                f"but got {self.num_choices} instead.",
                param=self.count_param,
                code="integer_above_max_value",
            )
        total, most = self.num_prompts * self.num_choices, config.max_choices
        if total > most:
            raise RequestError(
                f"Too many choices: {self.num_prompts} prompts x {self.num_choices} = {total}, "
                f"while one request may have at most {most}. Send fewer prompts at a time, or a smaller 'n'.",
                param=self.prompt_param,
                code="too_many_choices",
            )
        if self.num_prompts > (most_waiting := config.max_waiting_groups):
            raise RequestError(
                f"Too many prompts: {self.num_prompts}, while at most {most_waiting} may wait for their first token on "
                "this server, so they would never be taken in together. Send fewer at a time.",
                param=self.prompt_param,
                code="too_many_prompts",
            )
