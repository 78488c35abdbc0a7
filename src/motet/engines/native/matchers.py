"""Where the choices of a group begin in its grammar. May take long (compiling, and reading what was written), so the
engine process has it done beside its steps (`compiling`)."""

from motet.errors import GrammarError, ModelLoadError
from motet.grammar.compiled import Grammars, Matcher
from motet.types import GenerateRequest


def matchers_of(grammars: Grammars | None, request: GenerateRequest) -> dict[int, Matcher]:
    """By index of the choice; none for a group without a grammar. GrammarError if the grammar cannot be compiled, or
    does not allow what a choice has written."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    if grammars is None:
        raise GrammarError("this engine has no tokenizer, which a grammar needs")
    try:
        compiled = grammars.get(grammar)
    except ModelLoadError as error:
        raise GrammarError(f"a grammar needs the model's tokenizer: {error.message}") from error
    return {start.index: compiled.matcher(start.written) for start in request.choices}


def at_once(grammars: Grammars | None, request: GenerateRequest) -> bool:
    """Whether `matchers_of` takes no longer than a few copies."""
    grammar = request.sampling.grammar
    if grammar is None or grammars is None:
        return True
    return grammars.kept(grammar) is not None and not any(start.written for start in request.choices)
