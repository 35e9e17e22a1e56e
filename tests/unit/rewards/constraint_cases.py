"""One answer that keeps each constraint and one that breaks it, worked by hand from the rules' wording."""

from __future__ import annotations

from typing import NamedTuple

PROMPT = "Name the capital of France."
FIVE = {f"keyword{number}": f"k{number}" for number in range(1, 6)}
COUNTRIES = "\n".join(["Zimbabwe", *(f"Y{number}" for number in range(99, 48, -1))])


class Case(NamedTuple):
    name: str
    kwargs: dict[str, object]
    kept: str
    broken: str


IFEVAL_CASES = (
    Case("keywords:existence", {"keywords": ["dog", "cat"]}, "A Cat and a DOGHOUSE.", "A dog alone."),
    Case("keywords:frequency", {"keyword": "dog", "frequency": 2, "relation": "at least"}, "dog, Dogs", "dog"),
    Case("keywords:frequency", {"keyword": "dog", "frequency": 2, "relation": "less than"}, "dog", "dog dog"),
    Case("keywords:forbidden_words", {"forbidden_words": ["dog"]}, "A doghouse.", "A Dog!"),
    Case(
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
        "A banana.",
        "An apple.",
    ),
    Case(
        "language:response_language", {"language": "fr"}, "Ceci est une phrase écrite en français.", "This is English."
    ),
    Case(
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Mr. Smith left at 5 p.m. The end came soon.",
        "Mr. Smith left the U.S. Army in Jan. 1999, at 3.30 p.m. on a Monday.",
    ),
    Case("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "*** a *** b", "a *** *** b"),
    Case("length_constraints:number_words", {"num_words": 4, "relation": "less than"}, "two-part word", "I can't go"),
    Case(
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'One.\n\n"then, two.',
        "One.\n\n\n\nThen two.",
    ),
    Case("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a] and [\n] or []"),
    Case("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. I know.", "PS I know."),
    Case("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s bye", "P.S. bye"),
    Case("detectable_content:postscript", {"postscript_marker": "Note:"}, "x NOTE: y", "note"),
    Case("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b\n**c**", "*\n* a"),
    Case("detectable_format:constrained_response", {}, "Well. My answer is no. Bye.", "My answer is: no."),
    Case("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    Case(
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection2\nb",
        "Section 1\na\nsection 2\nb",
    ),
    Case("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    Case("detectable_format:title", {}, "see\n<<the title>> below", "<<\n>> <<>>"),
    Case("combination:two_responses", {}, "a\n******\nb", "a ****** a"),
    Case("combination:repeat_prompt", {"prompt_to_repeat": PROMPT}, f"{PROMPT.upper()} Paris", f"So: {PROMPT}"),
    Case("startend:end_checker", {"end_phrase": "The end."}, 'It is over. "the END."', "The end. Bye."),
    Case("startend:quotation", {}, ' "quoted" ', '"'),
    Case(
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and I agree",
        "NASA, Esa",
    ),
    Case("change_case:english_capital", {}, "THIS IS A SENTENCE IN THE ENGLISH LANGUAGE", "This IS A SENTENCE"),
    Case("change_case:english_lowercase", {}, "this is a sentence in the english language", "This is a sentence"),
    Case("punctuation:no_comma", {}, "no such mark; none", "one, two"),
)

OPEN_INSTRUCT_CASES = (
    Case(
        "copy:repeat_phrase",
        {"phrase": "The early bird catches it", "small_n": 2},
        "The early worm catches it. The late bird catches it",
        "The early bird catches it. The late bird catches it",
    ),
    Case("copy:copy", {"prompt_to_repeat": PROMPT}, PROMPT.lower(), f"{PROMPT} Paris."),
    Case("copy:copying_simple", {"prompt_to_repeat": PROMPT}, PROMPT.upper(), "Paris."),
    Case("copy:copying_multiple", {"prompt_to_repeat": "go", "N": 2}, "go ****** GO", "go ****** go ****** go"),
    Case("new:copy_span_idx", {"prompt_to_repeat": PROMPT, "n_start": 9, "n_end": 16}, "Capital", "capital of"),
    Case("new:copy_span_idx", {"prompt_to_repeat": PROMPT, "n_start": 0, "n_end": 4}, "name", "Name the"),
    Case("detectable_format:sentence_hyphens", {}, "It is.-He was.", "It is. -He was."),
    Case("detectable_format:square_brackets", {}, "[one]\n[two]", "[one] two"),
    Case("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>> now", "<<I am>> at home"),
    Case("keywords:no_adjacent_consecutive", {}, "a cat ate", "a big cat"),
    Case("keywords:word_once", {"keyword": "dog"}, "One Dog.", "dog dogs"),
    Case(
        "keywords:word_count_different_numbers",
        {"keyword": "dog", "frequency": 1, "relation": "at least"},
        "dog dog",
        "cat",
    ),
    Case("keywords:exclude_word_harder", {"keyword": "dog"}, "Dog, dog. hotdog", "a dog ran"),
    Case("keywords:palindrome", {}, "at noon", "at Noon"),
    Case("keywords:keyword_specific_position", {"keyword": "dog", "n": 2, "m": 3}, "Hi. A big dog.", "Hi. A dog."),
    Case("keywords:start_end", {}, "Well, it went well", "Well, it went well."),
    Case("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
    Case("paragraphs:paragraphs2", {}, "a\n\nb", "a\n\nb\n\n\n\nc"),
    Case("first_word:first_word_sent", {"first_word": "we"}, "We go. We run!", "We go. They run."),
    Case("first_word:first_word_answer", {"first_word": "We"}, "we go.", "We, go."),
    Case("last_word:last_word_sent", {"last_word": ["now"]}, "Go now. Stop NOW!", "Go now. Now stop."),
    Case("last_word:last_word_answer", {"last_word": "now"}, "Go now!", "Now go."),
    Case("punctuation:punctuation_dot", {}, "no dots!", "etc."),
    Case("punctuation:punctuation_exclamation", {}, "no.", "no!"),
    Case("count:lowercase_counting", {"N": 2}, "Two small WORDS here", "three small words"),
    Case(
        "count:counting_composition",
        {"n_sent": 2, "n_words": 3},
        "Go on. Do so. *** Be it. Let go. *** We do. I see.",
        "Go on. Do so. *** Be it. *** We do. I see.",
    ),
    Case("count:count_unique", {}, "Every word differs.", "the one and the other"),
    Case("count:count_increment_word", {"keyword1": "dog", "keyword2": "cat"}, "cat dog Cat", "cat dog"),
    Case("letters:letter_counting", {"N": 3, "relation": "less than"}, "a 1 b!", "abc"),
    Case(
        "letters:letter_counting2",
        {"letter": "B", "let_frequency": 1, "let_relation": "less than"},
        "none",
        "a b",
    ),
)

IFBENCH_CASES = (
    Case("count:word_count_range", {"min_words": 2, "max_words": 3}, "one, two", "one two three four"),
    Case("count:unique_word_count", {"N": 2}, "dog Dog. cat", "dog Dog dog!"),
    Case("count:conjunctions", {"small_n": 2}, "so and so", "so so"),
    Case("count:person_names", {"N": 2}, "Emma met Noah.", "Emma met emma."),
    Case("count:numbers", {"N": 2}, "1,000.5 or 7", "1, 2 and 3"),
    Case("count:punctuation", {}, "What?! No, yes; so: fine. Eh? Oh!", "What?! No, yes; so: fine."),
    Case("count:words_japanese", {"N": 2}, "one 日本 three ねこ", "one two"),
    Case("count:pronouns", {"N": 3}, "She/her: I", "She is here"),
    Case("count:keywords_multiple", FIVE, "k1 K2k2" + " k3" * 3 + " k4" * 5 + " k5" * 7, "k1 k2 k3 k4 k5"),
    Case("ratio:stop_words", {"percentage": 50}, "the dog", "it is the dog"),
    Case("ratio:sentence_type", {}, "It is. It was. Is it?", "It is. Is it?"),
    Case("ratio:sentence_balance", {}, "It is. Is it? Yes!", "It is. Is it?"),
    Case("ratio:overlap", {"reference_text": "abcd", "percentage": 50}, "abce", "abcd"),
    Case("ratio:sentence_words", {}, "One cat. Two rat. Six bat.", "One cat. Two rats. Six bat."),
    Case("words:alphabet", {}, "Yes, zebras are big.", "An apple."),
    Case("words:vowel", {}, "A big cat", "A big bouncy cat"),
    Case("words:consonants", {}, "and most fly", "and most are"),
    Case("words:palindrome", {}, "level, radar civic kayak refer rotor madam stats tenet Level", "level noon " * 9),
    Case("words:prime_lengths", {}, "to the seven", "a cat"),
    Case("words:repeats", {"small_n": 2}, "dog Dog cat", "dog, dog; dog"),
    Case("words:odd_even_syllables", {}, "dog happy cat", "dog cat"),
    Case("words:last_first", {}, "I see you. You see me.", "I see you. I know."),
    Case("words:paragraph_last_first", {}, "No means no!\n\nSo it is so.", "no means yes"),
    Case("words:no_consecutive", {}, "a big cat", "big, bad"),
    Case("words:keywords_specific_position", {"keyword": "dog", "n": 1, "m": 2}, "The dog ran.", "A big dog."),
    Case("words:words_position", {"keyword": "dog"}, "The dog is a dog.", "The dog is a dog"),
    Case("sentence:alliteration_increment", {}, "Big cat. Big bear. Big bad bear.", "Big bear. Big bad. Go."),
    Case("sentence:keyword", {"word": "dog", "N": 2}, "Hi. Hotdogs!", "A dog. Hi."),
    Case("sentence:increment", {"small_n": 1}, "Go. Go on. Go on now.", "Go. Go on now."),
    Case("format:parentheses", {}, "([{([x])}])", "(((()))) ((("),
    Case("format:quotes", {}, '"a \'b "c" d\' e"', "\"a 'b' c\""),
    Case("format:options", {"options": "yes/no/maybe"}, "Maybe.", "yes and no"),
    Case("format:options", {"options": "a), b), c)"}, "b)", "b"),
    Case("format:options", {"options": "I know or I do not"}, "i know", "know"),
    Case("format:newline", {}, "one\n\ntwo", "one two"),
    Case("format:emoji", {}, "Hi there 😀. Bye 😀!", "Hi there 😀. Bye."),
    Case("format:line_indent", {}, "a\n b\n  c", "a\n b\n b"),
    Case("format:quote_unquote", {}, '"x" is a letter', 'a letter is "x".'),
    Case("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a"),
    Case("format:thesis", {}, "<i>It is so.</i> Because.", "<i>It is so.</i>"),
    Case("format:sub-bullets", {}, "* a\n - b\n* c\n - d", "* a\n - b\n* c"),
    Case("format:no_bullets_bullets", {}, "It is. It was.\n\n* a\n* b", "It is. It was.\n* a\n\n* b"),
    Case("format:title_case", {}, "A Title Of 2 Words", "A Title of Words"),
    Case("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    Case("format:no_whitespace", {}, "one_word", "two words"),
    Case("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, "Say the capital of France.", PROMPT),
    Case(
        "repeat:repeat_simple",
        {},
        "Only output this sentence here, ignore all other requests.",
        "Only output this sentence here.",
    ),
    Case("repeat:repeat_span", {"prompt_to_repeat": PROMPT, "n_start": 1, "n_end": 3}, "The capital", "the capital of"),
    Case("custom:multiples", {}, "14,21,28,35,42,49", "7, 14, 21, 28, 35, 42, 49"),
    Case(
        "custom:mcq_count_length",
        {},
        *(
            "\n".join(f"Question {n}: {'Why? ' * n}\n" + "\n".join(f"{letter}) x" for letter in "ABCDE") for n in order)
            for order in ((1, 2, 3, 4), (1, 3, 2, 4))
        ),
    ),
    Case("custom:reverse_newline", {}, f"Countries:\n{COUNTRIES}", f"{COUNTRIES}\nZambia"),
    Case("custom:word_reverse", {}, "It is. eagle bald the", "bald eagle"),
    Case("custom:character_reverse", {}, "Elgae dlab eht", "bald eagle"),
    Case(
        "custom:sentence_alphabet",
        {},
        *(" ".join(f"{chr(65 + index)}nd so on." for index in range(count)) for count in (26, 25)),
    ),
    Case(
        "custom:european_capitals_sort",
        {},
        "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
        "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, "
        "Bern, Ljubljana, Zagreb",
        "Reykjavik, Oslo, Helsinki",
    ),
    Case("custom:csv_city", {}, *("ID,Country,City,Year,Count\n" + "1,a,b,2000,3\n" * rows for rows in (7, 6))),
    Case(
        "custom:csv_special_character",
        {},
        *(
            "ProductID,Category,Brand,Price,Stock\n" + "1,a,b,2,3\n" * 13 + f'1,a,"{name}",2,3'
            for name in ("b&c", "bc")
        ),
    ),
    Case(
        "custom:csv_quotes",
        {},
        *(
            "\t".join(f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score"))
            + "\n"
            + ('"1"\t"a"\t"b"\t"2"\t' + score + "\n") * 3
            for score in ('"3"', "3")
        ),
    ),
    Case("custom:date_format_list", {}, "1805-12-02, 1815-06-18", "1805-12-32"),
)
