from pathlib import Path

from tools.cycles import SOURCE, circles, import_graph


def test_a_circle_is_seen_where_its_imports_are_hidden_too(tmp_path: Path):
    """`a` imports `b` inside a function, `b` imports `c` under TYPE_CHECKING, `c` imports `a` from its package."""
    for name, text in {
        "__init__": "from room.d import E\n",
        "a": "def f():\n    import room.b\n",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.c import C\n",
        "c": "from room import a\n",
        "d": "from room.a import f\nclass E: ...\n",
    }.items():
        path = tmp_path / "room" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    graph = import_graph(tmp_path)
    assert circles(graph) == [["room.a", "room.b", "room.c", "room.a"]]
    # Without one of the three it is no circle.
    assert circles({**graph, "room.b": frozenset()}) == []


def test_the_modules_of_finray_are_all_there():
    graph = import_graph(SOURCE)
    assert "finray.config.evaluation" in graph["finray.config.tasks"]
    assert len(graph) > 200
