// Who held which device when: lanes over time, from hours to microseconds.
//
// The view asks for what it shows and draws what it has meanwhile. A wide view comes as shares of each pixel column, a
// narrow one as spans. The mouse wheel scrolls the page; with Ctrl (or a pinch) it zooms.

import { css, duration, empty, h, replace } from "./dom";
import type { Context, Mounted } from "./main";
import type { FlowPage, Metrics, Span, TimelineView } from "./types";

const [TALL_ROW, LOW_ROW, FEW_LANES] = [36, 26, 12];
const AXIS = 24;
const MAX_LANES = 60;
const INSET = 5;
/** Seconds between the marks of the axis, from a minute on: so that they fall on whole minutes, hours and days. */
const LONG_STEPS = [1, 2, 5, 10, 30, 60, 120, 360, 720, 1440, 2880, 7200, 14400, 43200].map((minutes) => 60 * minutes);

export function timelinePage(root: HTMLElement, context: Context): Mounted {
  return new TimelinePage(root, context);
}

class TimelinePage implements Mounted {
  private readonly canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "timeline of devices and workers; arrow keys move, plus and minus zoom, 0 shows the whole run" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private readonly detail = h("div", { class: "detail", "aria-live": "polite" });
  private readonly legend = h("div", { class: "legend" });
  private readonly state = h("span", { class: "soft" });
  private readonly idle = h("div", {});
  private readonly lanesBar = h("span", {});
  private view: [number, number] | null = null;
  private data: TimelineView | null = null;
  private metrics: Metrics | null = null;
  private plan: FlowPage["plan"] = null;
  private lane = 0;
  private picked = "";
  private asking: AbortController | null = null;
  private isClosed = false;
  private isAsking = false;
  private isStale = false;
  private readonly redraw = () => this.draw();
  private readonly resized = new ResizeObserver(() => (this.draw(), void this.fetch()));

  constructor(root: HTMLElement, private readonly context: Context) {
    const at = context.params.get("t")?.split(",").map(Number);
    if (at?.length === 2 && at.every(Number.isFinite)) this.view = [at[0]!, at[1]!];
    this.lane = Number(context.params.get("lane") ?? 0) || 0;
    const button = (text: string, title: string, act: () => void) => h("button", { title, "aria-label": title, onclick: act }, text);
    const step = h("input", { type: "number", min: 0, class: "narrow", "aria-label": "step to show", onchange: () => this.showStep(Number(step.value), Number(step.value)) });
    replace(
      root,
      h("div", { class: "bar" }, button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)), button("‹", "earlier", () => this.pan(-0.3)), button("›", "later", () => this.pan(0.3)), h("button", { onclick: () => this.whole() }, "whole run"), h("button", { onclick: () => this.lastSteps() }, "last three steps"), h("label", {}, "step ", step), this.lanesBar, this.state),
      this.legend,
      h("div", { class: "canvas-box" }, this.canvas, this.tip),
      h("p", { class: "soft wide" }, "Drag to move, Ctrl and wheel (or a pinch) to zoom, click a span for what it was. Keys: ← → + − 0. A thin line below a lane is what the plan expected."),
      this.detail,
      this.idle,
    );
    this.listen();
    this.resized.observe(this.canvas.parentElement!);
    addEventListener("theme", this.redraw);
    void this.begin();
  }

  refresh(): void {
    if (this.context.source.isLive) void this.load();
  }

  close(): void {
    this.isClosed = true;
    this.asking?.abort();
    this.resized.disconnect();
    removeEventListener("theme", this.redraw);
  }

  private async begin(): Promise<void> {
    const key = this.context.run.key;
    await this.load();
    try {
      [this.metrics, this.plan] = await Promise.all([this.context.source.metrics(key, -1), this.context.source.flow(key).then((page) => page.plan)]);
    } catch {
      return; // the steps and the plan are extras; the next visit has them
    }
    this.draw();
  }

  /** At once; while an answer is awaited, when it has come: a wheel asks no faster than it is answered. */
  private async fetch(): Promise<void> {
    this.isStale = this.isAsking;
    if (this.isAsking) return;
    this.isAsking = true;
    do {
      this.isStale = false;
      await this.load();
    } while (this.isStale && !this.isClosed);
    this.isAsking = false;
  }

  private async load(): Promise<void> {
    this.asking?.abort();
    this.asking = new AbortController();
    const [from, to] = this.view ?? [0, 1e12];
    try {
      this.data = await this.context.source.timeline(this.context.run.key, { from, to, columns: Math.max(50, Math.round(this.width())), lane: this.lane, lanes: MAX_LANES }, this.asking.signal);
    } catch (error) {
      if ((error as Error).name !== "AbortError") replace(this.state, h("span", { class: "problem" }, (error as Error).message));
      return;
    }
    if (this.isClosed) return;
    this.say();
    this.draw();
  }

  private say(): void {
    const data = this.data!;
    const isMore = data.num_lanes > data.lanes.length;
    replace(this.lanesBar, isMore ? h("span", {}, `lanes ${this.lane + 1} to ${this.lane + data.lanes.length} of ${data.num_lanes} `, h("button", { disabled: !this.lane, onclick: () => this.turn(-MAX_LANES) }, "previous"), h("button", { disabled: this.lane + MAX_LANES >= data.num_lanes, onclick: () => this.turn(MAX_LANES) }, "next")) : null);
    if (!data.lanes.length) {
      replace(this.state, empty("No trace in this run folder yet: spans reach it within half a second of the run's start, and the page as soon as they are indexed."));
      return;
    }
    const [from, to] = this.range();
    replace(this.state, `${duration(to - from)} of ${duration(data.seconds)}${data.kind === "columns" ? ", drawn by pixel column" : `, ${data.spans!.length} spans`}`);
    const rows = data.lanes.map((lane, i) => h("tr", {}, h("td", {}, laneName(lane)), h("td", { class: "num" }, `${(100 * (data.busy[i] ?? 0)).toFixed(1)} %`), h("td", { class: "num" }, `${(100 * (1 - (data.busy[i] ?? 0))).toFixed(1)} %`)));
    replace(this.idle, h("details", {}, h("summary", {}, "Busy and idle share of each lane in this view"), h("table", { class: "facts" }, h("thead", {}, h("tr", {}, h("th", {}, "lane"), h("th", {}, "busy"), h("th", {}, "idle"))), h("tbody", {}, ...rows))));
  }

  // The view -----------------------------------------------------------------------------------------------------

  private range(): [number, number] {
    const end = this.data?.seconds || 1;
    return this.view ? [this.view[0], Math.max(this.view[1], this.view[0] + 1e-9)] : [0, end];
  }

  private look(from: number, to: number): void {
    const end = this.data?.seconds ?? 1;
    const span = Math.min(Math.max(to - from, 1e-6), end);
    from = Math.max(0, Math.min(from, end - span));
    this.view = span >= end * 0.999 ? null : [from, from + span];
    this.context.set({ t: this.view && this.view.map((t) => t.toFixed(6)).join(",") });
    this.draw();
    void this.fetch();
  }

  private whole(): void {
    this.look(0, Infinity);
  }

  private zoom(factor: number, at?: number): void {
    const [from, to] = this.range();
    const middle = at ?? (from + to) / 2;
    this.look(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  private pan(share: number): void {
    const [from, to] = this.range();
    this.look(from + share * (to - from), to + share * (to - from));
  }

  private turn(by: number): void {
    this.lane = Math.max(0, this.lane + by);
    this.context.set({ lane: this.lane ? String(this.lane) : null });
    void this.load();
  }

  /** When each step ended and how long it took, in seconds of the timeline. */
  private steps(): Map<number, [number, number]> {
    const found = new Map<number, [number, number]>();
    const taken = this.metrics?.series?.["time/step_s"];
    if (!taken || !this.data) return found;
    const times = new Map(this.metrics!.steps!.map((step, i) => [step, this.metrics!.times![i]!]));
    this.metrics!.x![taken.x]!.forEach((step, i) => {
      const end = (times.get(step) ?? NaN) - this.data!.begin_s;
      if (Number.isFinite(end)) found.set(step, [end - (taken.y[i] ?? 0), end]);
    });
    return found;
  }

  private showStep(first: number, last: number): void {
    const steps = this.steps();
    const [begin, end] = [steps.get(first), steps.get(last)];
    if (begin && end) this.look(begin[0] - 0.02 * (end[1] - begin[0]), end[1]);
    else replace(this.state, `there is no step ${first} in this run's figures`);
  }

  private lastSteps(): void {
    const steps = [...this.steps().keys()].sort((a, b) => a - b);
    if (steps.length) this.showStep(steps[Math.max(0, steps.length - 3)]!, steps[steps.length - 1]!);
  }

  // Hands --------------------------------------------------------------------------------------------------------

  private listen(): void {
    let drag: { x: number; moved: boolean } | null = null;
    const touches = new Map<number, number>();
    this.canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / this.width());
      }
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, moved: false };
      touches.set(event.pointerId, event.clientX);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (touches.size === 2 && touches.has(event.pointerId)) {
        const before = Math.abs([...touches.values()][0]! - [...touches.values()][1]!);
        touches.set(event.pointerId, event.clientX);
        const after = Math.abs([...touches.values()][0]! - [...touches.values()][1]!);
        if (after > 5) this.zoom(before / after);
        return;
      }
      touches.has(event.pointerId) && touches.set(event.pointerId, event.clientX);
      if (drag && Math.abs(event.clientX - drag.x) > (drag.moved ? 0 : 3)) {
        this.pan((drag.x - event.clientX) / this.width());
        drag = { x: event.clientX, moved: true };
      } else if (!drag) this.hover(event);
    });
    const end = (event: PointerEvent) => {
      if (drag && !drag.moved && event.type === "pointerup") void this.pick(event);
      drag = null;
      touches.delete(event.pointerId);
    };
    this.canvas.addEventListener("pointerup", end);
    this.canvas.addEventListener("pointercancel", end);
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("keydown", (event) => {
      const act = ({ ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.7), "0": () => this.whole(), Home: () => this.whole() } as Record<string, () => void>)[event.key];
      if (act) (event.preventDefault(), event.stopPropagation(), act());
    });
  }

  private get row(): number {
    return (this.data?.lanes.length ?? 0) > FEW_LANES ? LOW_ROW : TALL_ROW;
  }

  private width(): number {
    return Math.max(50, this.canvas.clientWidth - this.left());
  }

  private left(): number {
    return Math.min(190, this.canvas.clientWidth * 0.32);
  }

  private timeAt(x: number): number {
    const [from, to] = this.range();
    return from + (Math.max(0, x - this.left()) / this.width()) * (to - from);
  }

  private spanAt(event: MouseEvent): Span | undefined {
    const box = this.canvas.getBoundingClientRect();
    const [at, lane] = [this.timeAt(event.clientX - box.left), Math.floor((event.clientY - box.top) / this.row)];
    const near = (this.range()[1] - this.range()[0]) / this.width();
    return this.data?.spans?.filter((span) => span[0] === lane && span[2] - near <= at && at <= span[2] + span[3] + near).sort((a, b) => a[3] - b[3])[0];
  }

  private hover(event: PointerEvent): void {
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top) / this.row);
    const span = this.spanAt(event);
    let text = "";
    if (span) text = `${this.data!.names[span[1]]}: ${duration(span[3])} from ${span[2].toFixed(6)} s${span[6] & 2 ? ", not ended" : ""}`;
    else if (this.data?.kind === "columns" && event.clientX - box.left > this.left()) text = this.columnText(lane, event.clientX - box.left);
    this.tip.hidden = !text;
    this.tip.textContent = text;
    this.tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 240)}px`;
    this.tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  private columnText(lane: number, x: number): string {
    const data = this.data!;
    const shares = data.columns!.filter(([of]) => of === lane).map(([, name, values]): [string, number] => {
      const place = Math.floor(((this.timeAt(x) - data.from_s) / (data.to_s - data.from_s)) * values.length);
      return [data.names[name]!, (values[place] ?? 0) / data.full!];
    });
    const said = shares.filter(([, share]) => share > 0).sort((a, b) => b[1] - a[1]).map(([name, share]) => `${name} ${(100 * share).toFixed(0)} %`);
    return said.length ? `${this.timeAt(x).toFixed(2)} s: ${said.slice(0, 4).join(", ")}` : "";
  }

  private async pick(event: MouseEvent): Promise<void> {
    const span = this.spanAt(event);
    if (!span) return replace(this.detail);
    const known = await this.context.source.span(this.context.run.key, span[4], span[5]).catch((error: Error) => ({ problem: error.message }));
    const attributes = Object.entries((known as { attributes?: Record<string, unknown> }).attributes ?? {});
    const facts: [string, string][] = [["began", `${span[2].toFixed(6)} s`], ["took", `${duration(span[3])}${span[6] & 2 ? " (had not ended)" : ""}`], ["process", String((known as { process?: string }).process ?? "")], ...attributes.map(([name, value]): [string, string] => [name, typeof value === "string" ? value : JSON.stringify(value)])];
    replace(this.detail, h("h3", {}, this.data!.names[span[1]] ?? ""), h("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  // Drawing ------------------------------------------------------------------------------------------------------

  private draw(): void {
    const data = this.data;
    if (!data || this.isClosed) return;
    const [width, height] = [this.canvas.parentElement!.clientWidth, data.lanes.length * this.row + AXIS];
    const ratio = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    this.canvas.style.height = `${height}px`;
    const c = this.canvas.getContext("2d")!;
    c.scale(ratio, ratio);
    c.font = "12px system-ui";
    c.textBaseline = "middle";
    const left = this.left();
    const [from, to] = this.range();
    const x = (t: number) => left + ((t - from) / (to - from)) * (width - left);
    this.drawLanes(c, width, left);
    c.save();
    c.beginPath();
    c.rect(left, 0, width - left, height);
    c.clip();
    if (data.kind === "columns") this.drawColumns(c, x);
    else this.drawSpans(c, x, left, width);
    this.drawPlan(c, x, from, to);
    this.drawAxis(c, x, from, to, height);
    c.restore();
    this.drawLegend();
  }

  private drawLanes(c: CanvasRenderingContext2D, width: number, left: number): void {
    this.data!.lanes.forEach((lane, i) => {
      const y = i * this.row;
      c.fillStyle = css(i % 2 ? "--bg" : "--card");
      c.fillRect(0, y, width, this.row);
      c.save();
      c.beginPath();
      c.rect(0, y, left - 46, this.row);
      c.clip();
      c.fillStyle = css(lane.process ? "--soft" : "--ink");
      c.font = lane.process ? "12px system-ui" : "600 12px system-ui";
      c.fillText(laneName(lane), 4, y + this.row / 2);
      c.restore();
      c.fillStyle = css("--soft");
      c.font = "11px system-ui";
      c.textAlign = "right";
      c.fillText(`${(100 * (this.data!.busy[i] ?? 0)).toFixed(0)} %`, left - 8, y + this.row / 2);
      c.textAlign = "left";
    });
    c.textAlign = "right";
    c.fillText("busy", left - 8, this.data!.lanes.length * this.row + AXIS - 9);
    c.textAlign = "left";
  }

  private drawColumns(c: CanvasRenderingContext2D, x: (t: number) => number): void {
    const { columns, from_s, to_s, full, names } = this.data!;
    const used = new Map<number, number[]>();
    for (const [lane, name, shares] of columns!) {
      const base = used.get(lane) ?? new Array<number>(shares.length).fill(0);
      used.set(lane, base);
      c.fillStyle = this.fill(names[name]!);
      const step = (x(to_s) - x(from_s)) / shares.length;
      shares.forEach((share, i) => {
        if (!share) return;
        const tall = (share / full!) * (this.row - 6);
        c.fillRect(x(from_s) + i * step, lane * this.row + this.row - 3 - base[i]! - tall, step + 0.5, tall);
        base[i]! += tall;
      });
    }
  }

  private drawSpans(c: CanvasRenderingContext2D, x: (t: number) => number, left: number, width: number): void {
    const { spans, names, chunks } = this.data!;
    const depth = depths(spans!);
    c.font = "11px system-ui";
    for (const i of [...spans!.keys()].sort((a, b) => depth[a]! - depth[b]! || spans![b]![3] - spans![a]![3])) {
      const [lane, name, start, seconds, , , kind] = spans![i]!;
      const [a, b] = [Math.max(left - 2, x(start)), Math.min(width + 2, x(start + seconds))];
      if (b < left || a > width) continue;
      const inset = Math.min(3, depth[i]!) * INSET;
      const [y, tall] = [lane * this.row + 3 + inset, this.row - 6 - inset];
      c.fillStyle = this.fill(names[name]!);
      if (kind & 1) {
        c.fillRect(a - 1, lane * this.row + 2, 2, this.row - 4);
        continue;
      }
      c.fillRect(a, y, Math.max(0.7, b - a - (b - a > 3 ? 0.7 : 0)), tall);
      if (b - a > 40 && tall > 9) {
        c.save();
        c.beginPath();
        c.rect(a, y, b - a - 2, tall);
        c.clip();
        c.fillStyle = "#fff";
        c.fillText(names[name]!, a + 4, y + tall / 2 + 0.5);
        c.restore();
      }
    }
    this.drawChunks(c, x, spans!, chunks ?? []);
  }

  /** Lines between the spans that worked on one chunk, from stage to stage. */
  private drawChunks(c: CanvasRenderingContext2D, x: (t: number) => number, spans: Span[], chunks: [number, string][]): void {
    const by = new Map<string, Span[]>();
    for (const [i, chunk] of chunks) by.set(chunk, [...(by.get(chunk) ?? []), spans[i]!]);
    c.strokeStyle = css("--ink");
    c.globalAlpha = 0.45;
    for (const stages of by.values()) {
      stages.sort((a, b) => a[2] - b[2]);
      for (let i = 1; i < stages.length; i++) {
        const [a, b] = [stages[i - 1]!, stages[i]!];
        if (b[0] === a[0] || b[0] === stages[0]![0]) continue; // the same step, taken again after a resume
        c.beginPath();
        c.moveTo(x(a[2] + a[3]), a[0] * this.row + this.row / 2);
        c.lineTo(x(b[2]), b[0] * this.row + this.row / 2);
        c.stroke();
      }
    }
    c.globalAlpha = 1;
  }

  /** What the plan expected, as a line below the lane, laid at the beginning of every step in view. */
  private drawPlan(c: CanvasRenderingContext2D, x: (t: number) => number, from: number, to: number): void {
    const lanes = this.plan?.lanes ?? [];
    const steps = [...this.steps().values()].filter(([begin, end]) => end >= from && begin <= to);
    if (!lanes.length || steps.length > 30) return;
    for (const [begin] of steps)
      for (const part of lanes) {
        const lane = this.data!.lanes.findIndex((one) => one.lane === part.lane || laneName(one) === part.lane);
        if (lane < 0) continue;
        const [left, wide, y] = [x(begin + part.start_s), Math.max(1, x(begin + part.end_s) - x(begin + part.start_s)), (lane + 1) * this.row];
        c.fillStyle = css("--card");
        c.fillRect(left - 1, y - 8, wide + 2, 8);
        c.fillStyle = this.fill(part.name);
        c.fillRect(left, y - 6, wide, 5);
      }
  }

  private drawAxis(c: CanvasRenderingContext2D, x: (t: number) => number, from: number, to: number, height: number): void {
    const raw = (to - from) / Math.max(2, this.width() / 90);
    const size = 10 ** Math.floor(Math.log10(raw));
    const step = LONG_STEPS.find((n) => n >= raw && raw > 50) ?? [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw)!;
    c.fillStyle = css("--soft");
    c.font = "11px system-ui";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      c.globalAlpha = 0.25;
      c.fillRect(x(t), 0, 1, height - AXIS + 4);
      c.globalAlpha = 1;
      const text = step >= 60 ? duration(t) : `${t.toFixed(Math.max(0, Math.min(9, -Math.floor(Math.log10(step)))))} s`;
      if (x(t) + 3 + c.measureText(text).width <= x(to)) c.fillText(text, x(t) + 3, height - 9);
    }
  }

  private drawLegend(): void {
    const totals = new Map<string, number>();
    const data = this.data!;
    for (const span of data.spans ?? []) totals.set(data.names[span[1]]!, (totals.get(data.names[span[1]]!) ?? 0) + span[3]);
    for (const [, name, shares] of data.columns ?? []) totals.set(data.names[name]!, (totals.get(data.names[name]!) ?? 0) + shares.reduce((a, b) => a + b, 0));
    const names = [...totals].sort((a, b) => b[1] - a[1]).slice(0, 14).map(([name]) => name);
    const wanted = names.join() + this.picked;
    if (this.legend.dataset.of === wanted) return;
    this.legend.dataset.of = wanted;
    replace(this.legend, ...names.map((name) => {
      const chip = h("button", { class: "chip", "aria-pressed": String(this.picked === name), title: "show only this", onclick: () => ((this.picked = this.picked === name ? "" : name), this.draw()) }, name);
      chip.style.setProperty("--c", phaseColour(name));
      return chip;
    }));
  }

  private fill(name: string): string {
    return this.picked && this.picked !== name ? `${phaseColour(name)}33` : phaseColour(name);
  }
}

const PHASES: [RegExp, string][] = [
  [/wait/, "#8b9099"],
  [/onload|offload|switch|relaunch/, "#b8872b"],
  [/sync|publish|pull|canary|meet|update_weights|rollout\.update/, "#8d5bb8"],
  [/eval/, "#2f8f62"],
  [/generat|sampl|rollout/, "#3a76cc"],
  [/train|update|warm_up|actor|optim|backward/, "#cc6526"],
  [/reward|score|reference|critic|env|episode/, "#1f8e9c"],
  [/save|checkpoint|export/, "#a24a6b"],
  [/^step$/, "#6a7280"],
];

export function phaseColour(name: string): string {
  const known = PHASES.find(([pattern]) => pattern.test(name));
  if (known) return known[1];
  let code = 0;
  for (const letter of name) code = (code * 31 + letter.charCodeAt(0)) >>> 0;
  const hue = code % 360;
  return hexOf(hue, 0.38, 0.45);
}

function hexOf(hue: number, saturation: number, light: number): string {
  const part = (n: number) => {
    const k = (n + hue / 30) % 12;
    const value = light - saturation * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(255 * value).toString(16).padStart(2, "0");
  };
  return `#${part(0)}${part(8)}${part(4)}`;
}

export function laneName(lane: { process: string; lane: string }): string {
  return !lane.process || lane.process === lane.lane || lane.process.startsWith(`${lane.lane}#`) ? lane.lane : `${lane.process.replace(/#0$/, "")} · ${lane.lane}`;
}

/** How many spans of its lane each span lies in. */
export function depths(spans: Span[]): number[] {
  const depth = new Array<number>(spans.length).fill(0);
  const open = new Map<number, number[]>();
  const order = [...spans.keys()].sort((a, b) => spans[a]![2] - spans[b]![2] || spans[b]![3] - spans[a]![3]);
  for (const i of order) {
    const [lane, , start, seconds] = spans[i]!;
    const ends = open.get(lane) ?? [];
    while (ends.length && ends[ends.length - 1]! <= start + 1e-9) ends.pop();
    depth[i] = ends.length;
    ends.push(start + seconds);
    open.set(lane, ends);
  }
  return depth;
}
