"""Cycles become nodes, nodes come in the order of the data, and a file says the same as the object."""

from __future__ import annotations

import tomllib

import pytest

from rill.errors import PlanError
from rill.planning.graph import Edge, Graph, Node
from rill.planning.picture import draw


def test_nodes_come_in_the_order_of_the_data() -> None:
    names = ("actor", "rollout", "critic")
    edges = (Edge(source="rollout", target="critic"), Edge(source="critic", target="actor"))
    graph = Graph(nodes=tuple(Node(name=n) for n in names), edges=edges).collapsed()
    assert [node.name for node in graph.nodes] == ["rollout", "critic", "actor"]
    assert [graph.names_in(cut) for cut in graph.cuts(graph.everything)] == [
        ["rollout"],
        ["rollout", "critic"],
    ]


def test_a_file_says_the_same_as_the_graph() -> None:
    text = 'batch = 4\nnodes = ["a", "b"]\n[edges]\n"a -> b" = 12.5\n[syncs]\n"b -> a" = 3e9\n'
    graph = Graph.from_values(tomllib.loads(text))
    assert graph.syncs[0].bytes == 3e9
    assert Graph.from_values(graph.values()) == graph


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('nodes = ["a"]\n[edges]\n"a b" = 1', "is no edge"),
        ('nodes = ["a"]\n[edges]\n"a -> c" = 1', "names 'c'"),
        ('nodes = ["a"]\ncolour = 1', "unknown"),
        ("nodes = []", "no node"),
        ('nodes = ["a", "a"]', "twice"),
        ('nodes = ["a"]\nbatch = 0', "at least one item"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Graph.from_values(tomllib.loads(text))


def test_every_style_of_picture_shows_nodes_edges_and_weights() -> None:
    graph = Graph.from_values(
        {"batch": 2, "nodes": ["a", "b"], "edges": {"a -> b": 2e6}, "syncs": {"b -> a": 1e9}}
    )
    for style in ("text", "mermaid"):
        picture = draw(graph, style)
        assert "2 MB" in picture
        assert "1 GB" in picture
    with pytest.raises(PlanError, match="text, mermaid"):
        draw(graph, "crayon")
