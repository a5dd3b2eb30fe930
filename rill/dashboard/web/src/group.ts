// One group: its prompt, its samples token by token, side by side or as a diff, and its prompt over training.

import { diff } from "./diff";
import { empty, h, number, put, replace, select } from "./dom";
import type { Context } from "./main";
import { openingOf } from "./source";
import type { Group, GroupRow, Media, Sample } from "./types";

const FEW_TOKENS = 1500;
const FEW_LETTERS = 1200;

interface Shade {
  title: string;
  values(sample: Sample): (number | null)[] | undefined;
  /** From a value to a class of style.css. */
  look(value: number, all: number[]): string;
}

const steps = (share: number) => Math.max(0, Math.min(9, Math.round(share * 9)));
const SHADES: Record<string, Shade> = {
  logprob: { title: "log-probability", values: (sample) => sample.logprobs, look: (value) => `warm${steps(-value / 4)}` },
  mismatch: { title: "mismatch", values: (sample) => sample.logprobs && sample.trainer_logprobs?.map((value, i) => (value === null ? null : value - sample.logprobs![i]!)), look: (value) => (value < 0 ? `warm${steps(-value * 4)}` : `cool${steps(value * 4)}`) },
  advantage: { title: "advantage", values: (sample) => sample.advantages, look: (value, all) => (value < 0 ? "warm" : "cool") + steps(Math.abs(value) / Math.max(1e-9, ...all.map(Math.abs))) },
  entropy: { title: "entropy", values: (sample) => sample.entropies, look: (value) => `warm${steps(value / 3)}` },
  version: { title: "policy version", values: (sample) => sample.versions, look: (value, all) => `hue${(value - Math.min(...all.filter((one) => one >= 0))) % 8}` },
  mask: { title: "loss mask", values: (sample) => sample.mask, look: (value) => (value ? "cool3" : "masked") },
  none: { title: "nothing", values: () => [], look: () => "" },
};

export function showGroup(root: HTMLElement, context: Context, log: number, place: number, open: (row: GroupRow) => void): void {
  const key = context.run.key;
  void context.source.group(key, log, place).then(
    (group) => {
      draw();
      function draw() {
        const strip = h("div", { class: "strip" });
        replace(root, ...head(group), strip, controls(group, context, draw), ...body(group, context));
        if (group.prompt_id) void context.source.prompt(key, group.prompt_id).then(({ groups }) => drawStrip(strip, groups, group, context, open));
      }
    },
    (error: Error) => replace(root, h("p", { class: "problem" }, error.message)),
  );
}

function head(group: Group): HTMLElement[] {
  const facts = [`step ${group.step}`, group.evaluates && `evaluation ${group.evaluates}`, group.task, group.prompt_id && `prompt ${group.prompt_id}`, ...(group.tags ?? [])].filter(Boolean).join(", ");
  const answer = group.answer === null || group.answer === undefined ? null : h("p", {}, "expected answer ", h("code", {}, typeof group.answer === "string" ? group.answer : JSON.stringify(group.answer)));
  return [h("h2", {}, `Group ${group.group}`), h("p", { class: "soft" }, facts), group.dropped ? h("p", { class: "bad" }, `dropped: ${group.dropped}`) : null, answer].filter((part): part is HTMLHeadingElement => part !== null);
}

/** The same prompt over training: one cell for every time it came up. */
function drawStrip(root: HTMLElement, groups: GroupRow[], shown: Group, context: Context, open: (row: GroupRow) => void): void {
  if (groups.length < 2) return;
  const cells = groups.slice(0, 400).map((row) => {
    const isShown = row.log === shown.log && row.place === shown.place;
    const cell = h("button", { class: isShown ? "chosen" : "", title: `step ${row.step}: reward ${number(row.reward)}`, "aria-label": `step ${row.step}, reward ${number(row.reward)}`, onclick: () => open(row) });
    cell.style.setProperty("--r", String(Math.max(0, Math.min(1, row.reward ?? 0))));
    return cell;
  });
  replace(root, h("span", { class: "soft" }, `this prompt over training (${groups.length} times) `), ...cells, h("a", { href: context.href("rollouts", { prompt: shown.prompt_id ?? "" }) }, " only this prompt"));
}

function controls(group: Group, context: Context, draw: () => void): HTMLElement {
  const shade = context.params.get("shade") ?? "logprob";
  const layout = context.params.get("layout") ?? "list";
  const options = Object.entries(SHADES).map(([name, { title, values }]): [string, string] => [name, name === "none" || group.samples.some((sample) => values(sample)?.length) ? title : `${title} (not recorded)`]);
  const set = (changes: Record<string, string | null>) => (context.set(changes), draw());
  const against = group.samples.map((sample, i): [string, string] => [String(i), `sample ${i + 1} (${number(sample.reward)})`]);
  return h(
    "div",
    { class: "bar" },
    select("shade tokens by", options, shade, (value) => set({ shade: value })),
    select("show", [["list", "below one another"], ["side", "side by side"], ["diff", "as a diff"]], layout, (value) => set({ layout: value })),
    layout === "diff" ? select("against", against, context.params.get("against") ?? "0", (value) => set({ against: value })) : null,
  );
}

function body(group: Group, context: Context): HTMLElement[] {
  if (!group.samples.length) return [empty("This group has no samples.")];
  const layout = context.params.get("layout") ?? "list";
  const lead = group.samples[0]!;
  const opening = openingOf(lead.sampled, lead.tokens.length);
  const isShared = group.samples.every((sample) => openingOf(sample.sampled, sample.tokens.length) === opening && sample.tokens.slice(0, opening).join("") === lead.tokens.slice(0, opening).join(""));
  const prompt = isShared ? h("div", { class: "block prompt" }, h("span", { class: "role" }, "prompt"), folded(lead.tokens.slice(0, opening).join(""))) : null;
  const from = (sample: Sample) => (isShared ? openingOf(sample.sampled, sample.tokens.length) : 0);
  const reference = group.samples[Number(context.params.get("against") ?? 0)] ?? lead;
  const samples = (layout === "list" ? equalOnce(group.samples) : group.samples.map((sample): [Sample, number] => [sample, 1])).map(([sample, times]) => {
    const content = layout === "diff" && sample !== reference ? diffOf(reference.tokens.slice(from(reference)), sample.tokens.slice(from(sample))) : tokensOf(sample, from(sample), context);
    return h("section", { class: "sample", "aria-label": `sample ${group.samples.indexOf(sample) + 1}` }, sampleHead(sample, times, group.samples.indexOf(sample) + 1, sample === reference && layout === "diff"), mediaOf(sample, context), content);
  });
  return [...(prompt ? [prompt] : []), h("div", { class: `samples ${layout}` }, ...samples)];
}

/** Equal answers with equal rewards stand once. */
function equalOnce(samples: Sample[]): [Sample, number][] {
  const found = new Map<string, [Sample, number]>();
  for (const sample of samples) {
    const key = [sample.tokens.join(""), sample.reward, sample.error].join("\u0000");
    const known = found.get(key);
    if (known) known[1]++;
    else found.set(key, [sample, 1]);
  }
  return [...found.values()];
}

function sampleHead(sample: Sample, times: number, number_: number, isReference: boolean): HTMLElement {
  const sampled = sample.sampled.filter(Boolean).length;
  const parts = Object.entries(sample.parts ?? {});
  return h(
    "header",
    {},
    h("b", { class: (sample.reward ?? 0) > 0 ? "good" : "bad" }, `reward ${number(sample.reward)}`),
    times > 1 ? h("b", {}, ` × ${times}`) : null,
    h("span", { class: "soft" }, ` sample ${number_}${isReference ? " (the others are compared with it)" : ""}, ${sample.stop ?? ""}, ${sampled} tokens sampled, ${(sample.num_tokens ?? sample.tokens.length) - sampled} given`),
    parts.length > 1 ? h("span", { class: "soft" }, `; ${parts.map(([name, value]) => `${name} ${number(value)}`).join(", ")}`) : null,
    sample.tags?.length ? h("span", { class: "soft" }, `; ${sample.tags.join(", ")}`) : null,
    sample.error ? h("p", { class: "bad" }, sample.error) : null,
  );
}

interface Segment {
  role: string;
  start: number;
  end: number;
}

/** Stretches of one side: by the recorded turns, else by what was sampled and what was not. */
function segmentsOf(sample: Sample, from: number): Segment[] {
  const turns = (sample.turns ?? []).filter((turn) => turn.end > from).map((turn) => ({ ...turn, start: Math.max(turn.start, from) }));
  if (turns.length) return turns;
  const found: Segment[] = [];
  for (let i = from; i < sample.tokens.length; i++) {
    const role = sample.sampled[i] ? "answer" : found.length || from ? "observation" : "prompt";
    const last = found[found.length - 1];
    if (last?.role === role) last.end = i + 1;
    else found.push({ role, start: i, end: i + 1 });
  }
  return found;
}

const CALL = /<tool_call>[^]*?(<\/tool_call>|$)|<\|tool[_▁]calls?[^>]*begin\|>[^]*?(<\|tool[_▁]calls?[^>]*end\|>|$)|\[TOOL_CALLS\][^]*$/g;

/** Stretches of tokens that call a tool, in the ways that models write it. */
function callsOf(tokens: string[], segment: Segment): [number, number][] {
  const begins: number[] = [];
  let text = "";
  for (const token of tokens.slice(segment.start, segment.end)) (begins.push(text.length), (text += token));
  const tokenAt = (letter: number) => segment.start + begins.filter((begin) => begin <= letter).length - 1;
  return [...text.matchAll(CALL)].map((call) => [tokenAt(call.index), tokenAt(call.index + call[0].length - 1) + 1]);
}

function tokensOf(sample: Sample, from: number, context: Context): HTMLElement {
  const shade = SHADES[context.params.get("shade") ?? "logprob"] ?? SHADES.none!;
  const values = shade.values(sample);
  const all = (values ?? []).filter((value): value is number => value !== null);
  const segments = segmentsOf(sample, from);
  const box = h("div", { class: "text" });
  let left = FEW_TOKENS;
  const write = (segment: Segment, limit: number) => {
    const block = h("div", { class: `block ${segment.role}` }, segments.length > 1 ? h("span", { class: "role" }, segment.role) : null);
    if (!sample.sampled[segment.start]) put(block, folded(sample.tokens.slice(segment.start, segment.end).join("")));
    else {
      const calls = callsOf(sample.tokens, segment);
      for (let i = segment.start; i < Math.min(segment.end, segment.start + limit); i++) {
        const call = calls.find(([first, last]) => first <= i && i < last);
        if (call && call[0] === i) block.append(h("span", { class: "call" }, h("span", { class: "role" }, "calls a tool")));
        const value = values?.[i];
        const token = h("i", { class: sample.sampled[i] && value !== undefined && value !== null ? shade.look(value, all) : "" }, sample.tokens[i] ?? "");
        token.dataset.i = String(i);
        (call && block.lastElementChild?.className === "call" ? block.lastElementChild : block).append(token);
      }
    }
    return block;
  };
  for (const segment of segments) {
    if (left <= 0) break;
    box.append(write(segment, left));
    left -= segment.end - segment.start;
  }
  if (left < 0) box.append(h("button", { onclick: () => replace(box, ...segments.map((segment) => write(segment, Infinity))) }, `show all ${sample.tokens.length} tokens`));
  box.addEventListener("mouseover", (event) => {
    const token = event.target as HTMLElement;
    if (token.dataset.i && !token.title) token.title = tokenTitle(sample, Number(token.dataset.i));
  });
  return box;
}

function tokenTitle(sample: Sample, i: number): string {
  if (!sample.sampled[i]) return "given, not sampled";
  const facts: [string, number | null | undefined][] = [["log-probability", sample.logprobs?.[i]], ["trainer's", sample.trainer_logprobs?.[i]], ["advantage", sample.advantages?.[i]], ["entropy", sample.entropies?.[i]]];
  const said = facts.filter(([, value]) => value !== undefined && value !== null).map(([name, value]) => `${name} ${number(value)}`);
  const version = sample.versions?.[i];
  if (version !== undefined) said.push(`sampled after step ${version - 1}`);
  if (sample.mask && !sample.mask[i]) said.push("not trained on");
  return said.join(", ");
}

function diffOf(before: string[], after: string[]): HTMLElement {
  return h("div", { class: "text" }, ...diff(before, after).map(([kind, text]) => (kind === "same" ? h("span", {}, text) : h(kind === "gone" ? "del" : "ins", {}, text))));
}

function folded(text: string): HTMLElement {
  if (text.length <= FEW_LETTERS) return h("span", { class: "given" }, text);
  const whole = h("span", { class: "given" }, `${text.slice(0, FEW_LETTERS)} … `);
  whole.append(h("button", { onclick: () => replace(whole, text) }, `show all ${text.length} letters`));
  return whole;
}

function mediaOf(sample: Sample, context: Context): HTMLElement | null {
  if (!sample.media?.length) return null;
  return h("div", { class: "media" }, ...sample.media.map((media) => mediaElement(media, context)));
}

function mediaElement(media: Media, context: Context): HTMLElement {
  const address = media.data ?? (context.source.isLive ? context.source.mediaAddress(context.run.key, media.path) : "");
  const caption = media.caption ?? media.path;
  if (!address) return h("p", { class: "soft" }, `${media.path} lies in the run folder and is not part of this file`);
  const isVideo = media.kind === "video" || /\.(mp4|webm)$/i.test(media.path);
  const shown = isVideo ? h("video", { src: address, controls: true, muted: true, loop: true, preload: "metadata" }) : h("img", { src: address, alt: caption, loading: "lazy" });
  return h("figure", {}, shown, h("figcaption", {}, caption));
}

