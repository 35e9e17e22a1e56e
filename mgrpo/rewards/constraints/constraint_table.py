"""The table of constraints: the name of each in labels, and the function that checks it."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from mgrpo.rewards.constraints import (
    bench_counts,
    bench_custom,
    bench_formats,
    bench_words,
    copying,
    counts,
    keywords,
    text_formats,
)
from mgrpo.rewards.constraints.label_arguments import Checker

IFEVAL: dict[str, Checker] = {
    "keywords:existence": keywords.keywords_exist,
    "keywords:frequency": keywords.keyword_frequency,
    "keywords:forbidden_words": keywords.no_forbidden_words,
    "keywords:letter_frequency": keywords.letter_frequency,
    "language:response_language": text_formats.response_language,
    "length_constraints:number_sentences": counts.number_sentences,
    "length_constraints:number_paragraphs": counts.number_paragraphs,
    "length_constraints:number_words": counts.number_words,
    "length_constraints:nth_paragraph_first_word": counts.nth_paragraph_first_word,
    "detectable_content:number_placeholders": text_formats.placeholders,
    "detectable_content:postscript": text_formats.postscript,
    "detectable_format:number_bullet_lists": text_formats.bullet_points,
    "detectable_format:constrained_response": text_formats.one_of_three_answers,
    "detectable_format:number_highlighted_sections": text_formats.highlights,
    "detectable_format:multiple_sections": text_formats.sections,
    "detectable_format:json_format": text_formats.json_text,
    "detectable_format:title": text_formats.title,
    "combination:two_responses": copying.two_responses,
    "combination:repeat_prompt": copying.prompt_then_answer,
    "startend:end_checker": text_formats.end_phrase,
    "startend:quotation": text_formats.quoted,
    "change_case:capital_word_frequency": text_formats.capital_words,
    "change_case:english_capital": text_formats.english_capitals,
    "change_case:english_lowercase": text_formats.english_lowercase,
    "punctuation:no_comma": text_formats.no_comma,
}
"""Google's IFEval."""

OPEN_INSTRUCT: dict[str, Checker] = {
    "copy:repeat_phrase": copying.phrase_varied,
    "copy:copy": copying.prompt_copied,
    "copy:copying_simple": copying.prompt_copied,
    "copy:copying_multiple": copying.prompt_copied_often,
    "new:copy_span_idx": copying.span_copied,
    "detectable_format:sentence_hyphens": text_formats.hyphenated_sentences,
    "detectable_format:square_brackets": text_formats.bracketed_words,
    "detectable_format:bigram_wrapping": text_formats.wrapped_bigrams,
    "keywords:no_adjacent_consecutive": keywords.no_consecutive_letters,
    "keywords:word_once": keywords.keyword_once,
    "keywords:word_count_different_numbers": keywords.keyword_frequency,
    "keywords:exclude_word_harder": keywords.keyword_excluded,
    "keywords:palindrome": keywords.palindrome,
    "keywords:keyword_specific_position": keywords.keyword_at_position,
    "keywords:start_end": keywords.same_start_and_end,
    "paragraphs:paragraphs": counts.two_divided_paragraphs,
    "paragraphs:paragraphs2": counts.two_spaced_paragraphs,
    "first_word:first_word_sent": counts.first_word_of_sentences,
    "first_word:first_word_answer": counts.first_word_of_response,
    "last_word:last_word_sent": counts.last_word_of_sentences,
    "last_word:last_word_answer": counts.last_word_of_response,
    "punctuation:punctuation_dot": text_formats.no_dot,
    "punctuation:punctuation_exclamation": text_formats.no_exclamation_mark,
    "count:lowercase_counting": text_formats.lowercase_words,
    "count:counting_composition": counts.three_counted_paragraphs,
    "count:count_unique": keywords.unique_words,
    "count:count_increment_word": keywords.keyword_once_and_twice,
    "letters:letter_counting": keywords.letter_count,
    "letters:letter_counting2": keywords.letter_frequency,
}
"""Open Instruct's additions to IFEval."""

IFBENCH: dict[str, Checker] = {
    "count:word_count_range": bench_counts.word_count_range,
    "count:unique_word_count": bench_counts.unique_word_count,
    "count:conjunctions": bench_counts.conjunctions,
    "count:person_names": bench_counts.person_names,
    "count:numbers": bench_counts.numbers,
    "count:punctuation": bench_counts.every_mark,
    "count:words_japanese": bench_counts.words_japanese,
    "count:pronouns": bench_counts.pronouns,
    "count:keywords_multiple": bench_counts.keywords_multiple,
    "ratio:stop_words": bench_counts.stop_words,
    "ratio:sentence_type": bench_counts.two_statements_a_question,
    "ratio:sentence_balance": bench_counts.balanced_sentence_kinds,
    "ratio:overlap": bench_counts.trigram_overlap,
    "ratio:sentence_words": bench_counts.three_equal_sentences,
    "words:alphabet": bench_words.alphabet_loop,
    "words:vowel": bench_words.three_vowels,
    "words:consonants": bench_words.consonant_clusters,
    "words:palindrome": bench_words.ten_palindromes,
    "words:prime_lengths": bench_words.prime_lengths,
    "words:start_verb": bench_words.starts_with_verb,
    "words:repeats": bench_counts.word_repeats,
    "words:odd_even_syllables": bench_words.alternating_syllables,
    "words:last_first": bench_words.linked_sentences,
    "words:paragraph_last_first": bench_words.linked_paragraphs,
    "words:no_consecutive": bench_words.no_shared_initials,
    "words:keywords_specific_position": keywords.keyword_at_position,
    "words:words_position": bench_words.second_words,
    "sentence:alliteration_increment": bench_words.growing_alliteration,
    "sentence:keyword": bench_words.keyword_in_sentence,
    "sentence:increment": bench_words.growing_sentences,
    "format:parentheses": bench_formats.nested_brackets,
    "format:quotes": bench_formats.nested_quotes,
    "format:options": bench_formats.one_of_options,
    "format:newline": bench_formats.word_a_line,
    "format:emoji": bench_formats.emoji_ends,
    "format:line_indent": bench_formats.stairs,
    "format:quote_unquote": bench_formats.explained_quotes,
    "format:list": bench_formats.separators,
    "format:thesis": bench_formats.italic_thesis,
    "format:sub-bullets": bench_formats.sub_bullets,
    "format:no_bullets_bullets": bench_formats.sentences_then_bullets,
    "format:title_case": bench_words.title_case,
    "format:output_template": bench_formats.output_template,
    "format:no_whitespace": bench_formats.no_whitespace,
    "repeat:repeat_change": bench_formats.prompt_changed,
    "repeat:repeat_simple": bench_formats.sentence_copied,
    "repeat:repeat_span": bench_formats.words_copied,
    "custom:multiples": bench_custom.multiples_of_seven,
    "custom:mcq_count_length": bench_custom.four_questions,
    "custom:reverse_newline": bench_custom.african_countries,
    "custom:word_reverse": bench_custom.bald_eagle_by_word,
    "custom:character_reverse": bench_custom.bald_eagle_by_letter,
    "custom:sentence_alphabet": bench_custom.alphabet_story,
    "custom:european_capitals_sort": bench_custom.northern_capitals,
    "custom:csv_city": bench_custom.city_table,
    "custom:csv_special_character": bench_custom.product_table,
    "custom:csv_quotes": bench_custom.student_table,
    "custom:date_format_list": bench_custom.napoleonic_dates,
}
"""IFBench."""

CONSTRAINTS: dict[str, Checker] = IFEVAL | OPEN_INSTRUCT | IFBENCH


def checker_of(name: object, table: dict[str, Checker]) -> Callable[..., bool]:
    """The checker called `name`; ValueError, with similar names, for an unknown one."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else "docs/rewards.md lists the constraints"
    raise ValueError(f"unknown constraint {name!r}; {meant}")
