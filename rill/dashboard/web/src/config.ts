// Every resolved value with where it came from, and what differs between runs.

import { empty, h, later, replace, select } from "./dom";
import type { Context, Mounted } from "./main";
import type { ConfigPage, RunSummary } from "./types";

export function configPage(root: HTMLElement, context: Context): Mounted {
  const bar = h("div", { class: "bar" });
  const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Configuration" });
  replace(root, bar, table);
  let [own, other]: [ConfigPage | null, ConfigPage | null] = [null, null];
  let runs: RunSummary[] = context.runs;

  const draw = () => {
    if (!own) return;
    if (own.problem) return replace(table, empty(own.problem));
    const words = (context.params.get("key") ?? "").toLowerCase();
    const isShort = context.params.get("only") === "set";
    const theirs = new Map(other?.rows.map(([key, value, origin]) => [key, [value, origin]] as const));
    const mine = new Map(own.rows.map(([key, value, origin]) => [key, [value, origin]] as const));
    const keys = other ? [...new Set([...mine.keys(), ...theirs.keys()])].filter((key) => (mine.get(key)?.[0] ?? "") !== (theirs.get(key)?.[0] ?? "")) : [...mine.keys()];
    const shown = keys.filter((key) => key.toLowerCase().includes(words) && (!isShort || !["default", "unset", ""].includes(mine.get(key)?.[1] ?? "")));
    const columns = other ? ["key", context.run.name, other_name(), "origin here"] : ["key", "value", "origin"];
    const rows = shown.map((key) => h("tr", { class: mine.get(key)?.[1] === "default" || !mine.get(key)?.[0] ? "default" : "" }, h("th", { scope: "row" }, key), h("td", {}, h("code", {}, mine.get(key)?.[0] || "–")), other ? h("td", {}, h("code", {}, theirs.get(key)?.[0] || "–")) : null, h("td", { class: "soft" }, mine.get(key)?.[1] ?? "")));
    replace(table, rows.length ? h("table", { class: "facts config" }, h("thead", {}, h("tr", {}, ...columns.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows)) : empty(other ? "The two runs have the same configuration." : "No key matches."));
  };
  const other_name = () => runs.find((run) => run.key === context.params.get("diff"))?.name ?? "the other";
  const load = async () => {
    try {
      const key = context.params.get("diff");
      [own, other] = await Promise.all([context.source.config(context.run.key), key ? context.source.config(key) : null]);
      draw();
    } catch (error) {
      replace(table, h("p", { class: "problem" }, (error as Error).message));
    }
  };
  const filter = later(80, draw);
  const words = h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys", value: context.params.get("key") ?? "", oninput: () => (context.set({ key: words.value }), filter()) });
  void context.source.runs().then((all) => {
    runs = all;
    const others = all.filter((run) => run.key !== context.run.key).map((run): [string, string] => [run.key, run.name]);
    replace(
      bar,
      words,
      select("show", [["", "all keys"], ["set", "only what was set"]], context.params.get("only") ?? "", (value) => (context.set({ only: value }), draw())),
      others.length ? select("compare with", [["", "no other run"], ...others], context.params.get("diff") ?? "", (value) => (context.set({ diff: value }), void load())) : null,
    );
  });
  void load();
  return {};
}
