"""The graph comes out of call records, cycles become nodes, and a file says the same as the object."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rill.errors import PlanError
from rill.planning.graph import CallRecord, Edge, Graph, Node, Traffic, Turn, read_history
from rill.planning.picture import draw


def call(number: int, node: str, took: str = "", put: str = "", items: int = 8, rank: int = 0) -> CallRecord:
    group, method = node.split(".")
    return CallRecord(
        call=number, group=group, method=method, rank=rank, start_s=0.0, end_s=2.0, wait_s=0.5,
        took=tuple(Traffic(channel=c, items=items, bytes=items * 10) for c in took.split()),
        put=tuple(Traffic(channel=c, items=items, bytes=items * 100) for c in put.split()),
        turns=(Turn(device=rank, start_s=0.0, end_s=2.0),), onload_s=0.25, offload_s=0.25,
    )  # fmt: skip


def test_channels_become_edges_and_the_drivers_own_do_not() -> None:
    calls = [
        call(1, "rollout.generate", took="prompts", put="answers"),
        call(1, "rollout.generate", took="prompts", put="answers", rank=1),
        call(2, "actor.train", took="answers", put="figures", items=16),
    ]
    graph = Graph.from_calls(calls)
    assert [(e.source, e.target, e.bytes_per_item) for e in graph.edges] == [
        ("rollout.generate", "actor.train", 100.0)
    ]
    assert graph.batch == 16
    assert graph.nodes[0].devices == (0, 1)
    assert calls[0].busy_s == 1.0


def test_a_cycle_becomes_one_node_that_names_its_members() -> None:
    calls = [
        call(1, "env.step", took="actions", put="observations"),
        call(2, "policy.act", took="observations", put="actions trajectories"),
        call(3, "actor.train", took="trajectories"),
    ]
    graph = Graph.from_calls(calls).collapsed()
    assert [node.name for node in graph.nodes] == ["env.step+policy.act", "actor.train"]
    assert graph.nodes[0].members == ("env.step", "policy.act")
    assert len(graph.edges) == 1
    assert len(graph.folded) == 2


def test_nodes_come_in_the_order_of_the_data() -> None:
    names = ("actor", "rollout", "critic")
    edges = (Edge(source="rollout", target="critic"), Edge(source="critic", target="actor"))
    graph = Graph(nodes=tuple(Node(name=n) for n in names), edges=edges).collapsed()
    assert [node.name for node in graph.nodes] == ["rollout", "critic", "actor"]
    assert [graph.names_in(cut) for cut in graph.cuts(graph.everything)] == [
        ["rollout"],
        ["rollout", "critic"],
    ]


def test_a_graph_file_says_the_same_as_the_graph(tmp_path: Path) -> None:
    text = 'batch = 4\nnodes = ["a", "b"]\n[edges]\n"a -> b" = 12.5\n[syncs]\n"b -> a" = 3e9\n'
    (tmp_path / "graph.toml").write_text(text)
    graph = Graph.load(tmp_path / "graph.toml")
    assert graph.syncs[0].bytes == 3e9
    (tmp_path / "again.toml").write_text(graph.dumps())
    assert Graph.load(tmp_path / "again.toml") == graph


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
def test_a_graph_that_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "graph.toml").write_text(text)
    with pytest.raises(PlanError, match=words):
        Graph.load(tmp_path / "graph.toml")


def test_history_is_read_from_a_run_folder_and_checked(tmp_path: Path) -> None:
    record = call(1, "rollout.generate", put="answers")
    (tmp_path / "history.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    assert read_history(tmp_path) == [record]
    (tmp_path / "history.jsonl").write_text('{"call": "one"}\n')
    with pytest.raises(PlanError, match="no call records"):
        read_history(tmp_path)


def test_every_style_of_picture_shows_nodes_edges_and_weights() -> None:
    graph = Graph.from_values(
        {"batch": 2, "nodes": ["a", "b"], "edges": {"a -> b": 2e6}, "syncs": {"b -> a": 1e9}}
    )
    for style in ("text", "dot", "mermaid"):
        picture = draw(graph, style)
        assert "2 MB" in picture
        assert "1 GB" in picture
    with pytest.raises(PlanError, match="text, dot, mermaid"):
        draw(graph, "crayon")
