"""The rule for commits that raise the line budget."""

from scripts.line_budget import unnamed

BEFORE = "room\tlines\na\t10\nb\t20\n"
AFTER = "room\tlines\na\t8\nb\t25\nnew\t3\n"


def test_a_raised_room_is_named_with_its_lines_and_a_reason() -> None:
    assert unnamed(BEFORE, AFTER, "Subject") == ["Budget: b +5, ", "Budget: new +3, "]
    assert unnamed(BEFORE, AFTER, "S\n\nBudget: b +4, a reason\nBudget: new +3, \n") == [
        "Budget: b +5, ",
        "Budget: new +3, ",
    ]
    assert unnamed(BEFORE, AFTER, "S\n\nBudget: b +5, a reason\nBudget: new +3, split off a\n") == []
    assert unnamed(AFTER, "room\tlines\na\t8\n", "Subject") == []
