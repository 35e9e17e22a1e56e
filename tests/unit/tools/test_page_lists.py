"""Lists of a page, as the site's Markdown needs them."""

from __future__ import annotations

from tools.docs.lists import with_four_spaces


def test_code_and_text_stay_in_their_item():
    """With three spaces the site ends the list before the code, and begins another one at each number."""
    page = "1. **One**\n   goes on.\n\n   ```sh\n   if true\n     then\n   ```\n\n   Text.\n2. Two\n\nEnd.\n"
    assert with_four_spaces(page) == (
        "1. **One**\n    goes on.\n\n    ```sh\n    if true\n      then\n    ```\n\n    Text.\n\n2. Two\n\nEnd.\n"
    )


def test_lists_in_lists_keep_their_levels():
    """Two spaces are a level on GitHub, and nothing on the site."""
    page = "- **a**\n  - b\n    - c\n\n      text of c\n  - d\n- e\n"
    assert with_four_spaces(page) == "- **a**\n    - b\n        - c\n\n            text of c\n\n    - d\n- e\n"
    assert with_four_spaces("10. a\n    - b\n") == "10. a\n    - b\n"


def test_a_list_may_follow_text():
    """Without an empty line before them the items would be words of the paragraph."""
    assert with_four_spaces("Text:\n- a\n  of a\n- b\n") == "Text:\n\n- a\n    of a\n- b\n"


def test_what_is_in_no_list_stays():
    """Code blocks hold lists that are none, and indented code is code."""
    page = "Text\n\n    indented code\n\n```yaml\n- a\n  - b\n   c\n```\n\n* * *\n| a | b |\n   odd\n"
    assert with_four_spaces(page) == page


def test_a_page_is_changed_once():
    """What has four spaces already must not move."""
    page = "1. One\n\n    ```sh\n    x\n    ```\n\n- a\n    - b\n"
    assert with_four_spaces(page) == page
