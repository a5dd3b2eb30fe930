// Did it learn, and how is it doing: curves of one or several runs, and the run card.

import { colourOf, duration, empty, figure, h, later, replace, select } from "./dom";
import type { Context, Mounted } from "./main";
import { lastOf, PlotBoard, type Curve, type PlotSpec } from "./plots";
import type { Metrics, Overview, RunSummary } from "./types";

interface Panel extends PlotSpec {
  names: string[];
}

/** What a person calls a figure, and what it says. A panel without any of its figures is left out. */
const PANELS: Panel[] = [
  { title: "Reward", name: "reward/mean", what: "mean over the step's samples", names: ["reward/mean"] },
  { title: "Tokens per answer", name: "length/response", what: "sampled tokens, without the prompt", names: ["length/response"] },
  { title: "Cut off", name: "length/truncated", what: "share of answers that ended at the length limit", names: ["length/truncated"] },
  { title: "Entropy", name: "policy/entropy", what: "nats per token; near 0 the policy explores no more", names: ["policy/entropy"] },
  { title: "KL", name: "policy/kl", what: "to the reference, and between old and new policy", names: ["kl/mean", "policy/kl", "policy/ref_kl", "mismatch/kl"] },
  { title: "Mismatch", name: "mismatch/abs_mean", what: "mean |log π trainer − log π engine|, same tokens", names: ["mismatch/abs_mean"] },
  { title: "Effective samples", name: "mismatch/ess", what: "share of the batch that corrections leave in effect", names: ["mismatch/ess"] },
  { title: "Lag", name: "lag/mean", what: "versions between sampling and training", names: ["lag/mean", "lag/max"] },
  { title: "Tokens per second", name: "throughput/tokens_per_s", what: "of a whole step: all of them, and those sampled in it; and of training while it lasts", names: ["throughput/tokens_per_s", "throughput/sampled_tokens_per_s", "train_tokens_per_s"] },
  { title: "Seconds of a step", name: "time/step_s", what: "whole, and by phase", names: ["time/step_s", "time/rollout_wait_s", "time/train_s", "time/sync_s"] },
  { title: "Loss", name: "loss", what: "of the update", names: ["loss", "dpo/loss", "reward_model/loss", "value/loss"] },
  { title: "Gradient norm", name: "grad_norm", what: "before clipping", names: ["grad_norm"] },
  { title: "Supervised loss", name: "sft/loss", what: "where RL follows, its steps count up to 0", names: ["sft/loss"] },
  { title: "Supervised tokens per second", name: "sft/train_tokens_per_s", what: "prompt and answer", names: ["sft/train_tokens_per_s"] },
];
const LABELS: Record<string, string> = { "throughput/tokens_per_s": "step", "throughput/sampled_tokens_per_s": "sampled", train_tokens_per_s: "training" };
const DASHES: number[][] = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

export function overviewPage(root: HTMLElement, context: Context): Mounted {
  const top = h("div", {});
  const controls = h("div", { class: "bar" });
  const plots = h("div", { class: "plots" });
  const more = h("div", { class: "plots" });
  const card = h("div", {});
  const others = h("details", { class: "others", ontoggle: () => draw() }, h("summary", {}, "All other figures"), more);
  replace(root, top, controls, plots, others, card);
  const data = new Map<string, Metrics>();
  let board: PlotBoard | null = null;
  let isClosed = false;

  const refresh = async () => {
    try {
      const [overview] = await Promise.all([context.source.overview(context.run.key), ...context.runs.map(load)]);
      if (isClosed) return;
      replace(top, ...summary(overview, data.get(context.run.key), context));
      replace(card, ...runCard(overview));
    } catch (error) {
      replace(top, h("p", { class: "problem" }, (error as Error).message));
    }
  };
  const load = async (run: RunSummary) => {
    const known = data.get(run.key);
    const got = await context.source.metrics(run.key, known?.version ?? -1);
    if (!got.series || isClosed) return;
    data.set(run.key, got);
    if (context.runs.every((one) => data.has(one.key))) draw();
  };

  const draw = () => {
    board?.close();
    const axis = context.params.get("x") === "time" ? "time" : "step";
    const smoothing = Number(context.params.get("smooth") ?? "0.6");
    const zoom = context.params.get("zoom")?.split(",").map(Number);
    board = new PlotBoard((x) => (axis === "time" ? `${x.toFixed(1)} min` : `step ${Math.round(x)}`), zoom?.length === 2 && zoom.every(Number.isFinite) ? [zoom[0]!, zoom[1]!] : null, (range) => context.set({ zoom: range && range.map((x) => Number(x.toPrecision(6))).join(",") }));
    const names = [...new Set([...data.values()].flatMap((metrics) => Object.keys(metrics.series ?? {})))].sort();
    const drawn = new Set<string>();
    const panel = (spec: Panel) => {
      spec.names.forEach((name) => drawn.add(name));
      return board!.add(spec, curvesOf(spec.names, context.runs, data, axis), smoothing);
    };
    const evaluations = names.filter((name) => names.includes(`${name}_low`));
    const panels = evaluations.filter((name) => !/pass@/.test(name)).map((name): Panel => ({ title: name === "eval/accuracy" ? "Held-out accuracy" : name, name, what: "never trained on; with its 95 % interval", names: [name] }));
    const passes = evaluations.filter((name) => /pass@/.test(name));
    if (passes.length) panels.push({ title: "pass@k", name: passes[0]!, what: "one of k samples is right; with 95 % interval", names: passes });
    evaluations.forEach((name) => [name, `${name}_low`, `${name}_high`].forEach((one) => drawn.add(one)));
    panels.push(...PANELS);
    const here = panels.filter((spec) => spec.names.some((name) => names.includes(name)));
    replace(plots, ...(here.length ? here.map(panel) : [empty("No figures yet: the first come with the first step.")]));
    const rest = names.filter((name) => !drawn.has(name));
    others.hidden = !rest.length;
    replace(more, ...(others.open ? rest.map((name) => panel({ title: name, name, what: " ", names: [name] })) : []));
  };

  const redraw = later(30, draw);
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: context.params.get("smooth") ?? "0.6", "aria-label": "smoothing", oninput: () => (context.set({ smooth: smooth.value }), redraw()) });
  replace(
    controls,
    h("label", {}, "smoothing ", smooth),
    select("over", [["step", "steps"], ["time", "time"]], context.params.get("x") ?? "step", (value) => (context.set({ x: value, zoom: null }), draw())),
    h("button", { onclick: () => board?.zoom(null) }, "whole run"),
    h("span", { class: "soft wide" }, "drag over a plot to zoom in"),
    ...(context.runs.length > 1 ? context.runs.map((run, i) => chip(run.name, colourOf(i))) : []),
  );
  void refresh();
  return {
    refresh: () => void refresh(),
    close: () => {
      isClosed = true;
      board?.close();
    },
  };
}

function curvesOf(names: string[], runs: RunSummary[], data: Map<string, Metrics>, axis: string): Curve[] {
  const curves: Curve[] = [];
  runs.forEach((run, r) => {
    const metrics = data.get(run.key);
    const present = names.filter((name) => metrics?.series?.[name]);
    present.forEach((name, n) => {
      const series = metrics!.series![name]!;
      const steps = metrics!.x![series.x]!;
      const label = [runs.length > 1 ? run.name : "", present.length > 1 ? short(name, present) : ""].filter(Boolean).join(" ") || run.name;
      const [low, high] = [metrics!.series![`${name}_low`], metrics!.series![`${name}_high`]];
      curves.push({
        label,
        colour: colourOf(runs.length > 1 ? r : n),
        dash: runs.length > 1 ? DASHES[n % DASHES.length]! : [],
        x: axis === "time" ? minutes(metrics!, steps) : steps,
        y: series.y,
        ...(low && high ? { low: low.y, high: high.y } : {}),
      });
    });
  });
  return curves;
}

function minutes(metrics: Metrics, steps: number[]): number[] {
  const times = new Map(metrics.steps!.map((step, i) => [step, metrics.times![i]!]));
  const begin = metrics.times![0] ?? 0;
  let last = begin;
  return steps.map((step) => {
    last = times.get(step) ?? last;
    return (last - begin) / 60;
  });
}

function short(name: string, among: string[]): string {
  const last = (one: string) => one.replace(/^.*\//, "");
  if (among.filter((one) => last(one) === last(name)).length > 1) return name;
  return LABELS[name] ?? name.replace(/^.*\//, "").replace(/_s$/, "").replace(/_/g, " ");
}

function chip(text: string, colour: string): HTMLElement {
  const element = h("span", { class: "chip" }, text);
  element.style.setProperty("--c", colour);
  return element;
}

function summary(run: Overview, metrics: Metrics | undefined, context: Context): (HTMLElement | null)[] {
  const tiles: HTMLElement[] = [];
  const tile = (label: string, value: string, note = "") => tiles.push(h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label), note ? h("span", { class: "soft" }, note) : null));
  const series = metrics?.series ?? {};
  const from = (name: string) => series[name]?.y.find((value) => value !== null) ?? null;
  const isRL = Boolean(series["reward/mean"]);
  for (const [name, label] of [["eval/accuracy", "held-out accuracy"], ["reward/mean", "reward"], ["length/response", "tokens per answer"], ["sft/loss", "loss"], ["eval/loss", "held-out loss"], ["throughput/sampled_tokens_per_s", "sampled tokens/s"]] as const) {
    const found = series[name];
    if (!found || (isRL && name === "sft/loss")) continue;
    const [low, high] = [lastOf(series[`${name}_low`]?.y ?? []), lastOf(series[`${name}_high`]?.y ?? [])];
    const interval = low !== null && high !== null ? `; 95 %: ${figure(name, low)} to ${figure(name, high)}` : "";
    tile(label, figure(name, lastOf(found.y)), found.y.length > 1 ? `from ${figure(name, from(name))}${interval}` : "");
  }
  tile("step", String(run.step), run.num_steps ? `of ${run.num_steps}` : "");
  const count = run.findings.length;
  tiles.push(h("a", { class: `tile ${count ? "bad" : "good"}`, href: context.href("guards") }, h("b", {}, count ? String(count) : "none"), h("span", {}, count === 1 ? "finding of the guards" : "findings of the guards"), h("span", { class: "soft" }, count ? run.findings[count - 1]!.guard : "nothing looks wrong")));
  const total = run.shares.reduce((sum, [, seconds]) => sum + seconds, 0);
  const shares = h("div", { class: "shares" });
  run.shares.forEach(([what, seconds], i) => {
    const part = h("div", { class: "share", title: `${what}: ${duration(seconds)}` }, seconds / total < 0.07 ? "" : `${what} ${((100 * seconds) / total).toFixed(0)} %`);
    part.style.setProperty("--c", colourOf(i));
    part.style.flexGrow = String(Math.max(seconds / total, 0.02));
    shares.append(part);
  });
  return [
    run.status === "failed" || run.status === "interrupted" ? h("p", { class: "soft" }, "go on with ", h("code", {}, run.resume)) : null,
    h("div", { class: "tiles" }, ...tiles),
    total ? h("section", { class: "where" }, h("h2", {}, "Where the time went"), shares, h("p", { class: "soft" }, run.shares.map(([what, seconds]) => `${what} ${duration(seconds)}`).join(", "), ". ", advice(run.shares[0]?.[0] ?? ""), " ", h("a", { href: context.href("timeline") }, "See the timeline."))) : null,
  ];
}

/** What would make it faster, by what takes longest. */
function advice(longest: string): string {
  if (/rollout/.test(longest)) return "Rollouts take longest: give them more devices, let them run ahead (loop.max_lag), or cut the longest answers.";
  if (/train/.test(longest)) return "Training takes longest: larger micro-batches, more devices for the actor, or sampling on other devices meanwhile (loop.max_lag).";
  if (/warm-up/.test(longest)) return "The warm-up takes longest: start from a trained model (model.path), or make it shorter (sft.steps).";
  if (/eval/.test(longest)) return "Evaluation takes longest: evaluate less often (eval.every) or on fewer problems (eval.num_prompts).";
  if (/sync/.test(longest)) return "Weight sync takes longest: look at sync.transport, and at where trainer and engines are placed.";
  return "";
}

function runCard(run: Overview): HTMLElement[] {
  const row = (question: string, answer: string) => h("tr", {}, h("th", { scope: "row" }, question), h("td", {}, answer));
  const machine = [["started with", run.machine.command], ["on", [run.machine.host, run.machine.platform, run.machine.cpus && `${run.machine.cpus} CPUs`].filter(Boolean).join(", ")], ["started", `${new Date(run.started_s * 1000).toLocaleString()}, ${run.machine.starts} time(s)`]] as const;
  return [
    h("h2", {}, "Run card"),
    h("p", { class: "soft" }, "What ran, on what, and the nine questions to ask before a result is believed."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Run card" }, h("table", { class: "facts" }, h("tbody", {}, ...machine.map(([name, value]) => row(name, value || "not recorded")), ...run.card.map(({ question, answer }) => row(question, answer))))),
  ];
}
