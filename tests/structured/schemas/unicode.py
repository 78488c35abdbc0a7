"""Keys and values of all scripts, and names with characters that must be escaped."""

from tests.structured.schemas.case import SchemaCase, closed, of_value, text

CASES = (
    SchemaCase(
        "keys_of_several_scripts",
        closed(größe={"type": "integer", "minimum": 0, "maximum": 300}, 名前=text(8), имя=text(8)),
        good=('{"größe":180,"名前":"太郎","имя":"Аня"}',),
        bad=('{"grosse":180,"名前":"太郎","имя":"Аня"}', '{"größe":180,"имя":"Аня"}'),
    ),
    SchemaCase(
        "key_that_is_a_picture",
        closed(**{"🎵": {"enum": ["♩", "♪", "♫"]}, "👩‍🚀": {"type": "boolean"}}),
        good=('{"🎵":"♪","👩‍🚀":true}',),
        bad=('{"🎵":"♬","👩‍🚀":true}', '{"🎵":"♪","👩":true}'),
        few_answers=True,
    ),
    SchemaCase(
        "words_of_several_scripts",
        closed(word={"enum": ["schön", "красиво", "美しい", "جميل", "נוף", "सुंदर", "😀"]}),
        good=('{"word":"美しい"}', '{"word":"😀"}', '{"word":"جميل"}'),
        bad=('{"word":"schon"}', '{"word":"美"}', '{"word":"😁"}'),
        message="A beautiful word?",
        few_answers=True,
    ),
    SchemaCase(
        "pattern_of_letters_beyond_ascii",
        closed(v={"type": "string", "pattern": "^[ぁ-ん]{3,8}$"}),
        good=('{"v":"こんにちは"}',),
        bad=('{"v":"konnichiwa"}', '{"v":"はい"}', '{"v":"コンニチハ"}'),
        message="日本語で挨拶して。",
    ),
    SchemaCase(
        "keys_that_must_be_escaped",
        closed(**{'the "name"': text(6), "back\\slash": text(6), "a b/c": text(6), "$ref": text(6), "": text(6)}),
        good=(r'{"the \"name\"":"a","back\\slash":"b","a b/c":"c","$ref":"d","":"e"}',),
        bad=(r'{"the name":"a","back\\slash":"b","a b/c":"c","$ref":"d","":"e"}',),
    ),
    of_value(
        "constant_that_looks_the_same_as_another", {"const": "e\u0301"}, ('"é"',), ('"é"', '"e"'), few_answers=True
    ),
)
