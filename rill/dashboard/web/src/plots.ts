// Curves: one plot, several runs laid over one another, one cursor and one zoom over all plots of a page.

import "uplot/dist/uPlot.min.css";
import uPlot from "uplot";
import { css, figure, h, replace } from "./dom";

export interface Curve {
  label: string;
  colour: string;
  dash?: number[];
  x: number[];
  y: (number | null)[];
  /** What is null is a gap in the line. */
  hasGaps?: boolean;
  /** The ends of an interval around y. */
  low?: (number | null)[];
  high?: (number | null)[];
}

export interface PlotSpec {
  title: string;
  what?: string;
  /** Whose way of writing numbers the plot uses. */
  name: string;
}

const MAX_TOLD = 6;
/** Distances between the marks of an axis: whole numbers for steps, powers of two for bytes. */
const TENS = Array.from({ length: 14 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** (i - 4))).flat();
const WHOLE = TENS.filter((n) => n >= 1);
const TWOS = Array.from({ length: 50 }, (_, i) => 2 ** i);

/** All plots of a page: they share the cursor and the zoom. */
export class PlotBoard {
  private readonly plots: Plot[] = [];
  private range: [number, number] | null;
  private readonly resize = new ResizeObserver(() => this.plots.forEach((plot) => plot.fit()));
  private readonly redraw = () => this.plots.forEach((plot) => plot.rebuild());

  constructor(private readonly xLabel: (x: number) => string, range: [number, number] | null, private readonly onzoom: (range: [number, number] | null) => void) {
    this.range = range;
    addEventListener("theme", this.redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  add(spec: PlotSpec, curves: Curve[], smoothing: number): HTMLElement {
    const plot = new Plot(spec, this.xLabel, (range) => this.zoom(range), (at) => this.plots.forEach((other) => other.point(at)));
    this.plots.push(plot);
    plot.set(curves, smoothing, this.range);
    this.resize.observe(plot.element);
    return plot.element;
  }

  zoom(range: [number, number] | null): void {
    this.range = range;
    this.plots.forEach((plot) => plot.show(range));
    this.onzoom(range);
  }

  close(): void {
    this.resize.disconnect();
    removeEventListener("theme", this.redraw);
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.redraw);
    this.plots.forEach((plot) => plot.close());
  }
}

class Plot {
  readonly element = h("section", { class: "plot" });
  private readonly values = h("span", { class: "values" });
  private readonly place = h("div", { class: "canvas", role: "img" });
  private chart: uPlot | null = null;
  private curves: Curve[] = [];
  private smoothing = 0;
  private range: [number, number] | null = null;
  private table: uPlot.AlignedData = [[]];

  constructor(private readonly spec: PlotSpec, private readonly xLabel: (x: number) => string, private readonly onzoom: (range: [number, number] | null) => void, private readonly onpoint: (x: number | null) => void) {
    const title = h("h3", { title: spec.name }, spec.title, this.values);
    replace(this.element, title, h("p", { class: "what", title: spec.what ?? "" }, spec.what ?? spec.name), this.place);
  }

  set(curves: Curve[], smoothing: number, range: [number, number] | null): void {
    [this.curves, this.smoothing, this.range] = [curves, smoothing, range];
    const said = curves.map((curve) => `${curve.label}: ${figure(this.spec.name, lastOf(curve.y))}`).join(", ");
    this.place.setAttribute("aria-label", `${this.spec.title}; latest ${said}`);
    this.rebuild();
  }

  rebuild(): void {
    this.chart?.destroy();
    this.chart = null;
    this.table = aligned(this.curves, this.smoothing);
    const width = this.place.clientWidth || 300;
    this.chart = new uPlot(this.options(width), this.table, this.place);
    this.tell(null);
  }

  fit(): void {
    const width = this.place.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: 170 });
  }

  show(range: [number, number] | null): void {
    this.range = range;
    const x = this.table[0] as number[];
    if (this.chart && x.length) this.chart.setScale("x", range ? { min: range[0], max: range[1] } : { min: ends(x)[0], max: ends(x)[1] });
  }

  /** The cursor of another plot stands at x. */
  point(x: number | null): void {
    if (!this.chart) return;
    this.chart.setCursor(x === null ? { left: -10, top: -10 } : { left: this.chart.valToPos(x, "x"), top: -10 }, false);
    this.tell(x);
  }

  close(): void {
    this.chart?.destroy();
  }

  private tell(x: number | null): void {
    const shown = this.curves.map((curve) => {
      const at = x === null ? -1 : nearest(curve.x, x);
      const value = at < 0 ? lastOf(curve.y) : curve.y[at];
      const [low, high] = at < 0 ? [lastOf(curve.low ?? []), lastOf(curve.high ?? [])] : [curve.low?.[at], curve.high?.[at]];
      const interval = this.curves.length === 1 && low !== null && low !== undefined && high !== null && high !== undefined ? ` (${figure(this.spec.name, low)} to ${figure(this.spec.name, high)})` : "";
      const name = this.curves.length > 1 ? `${curve.label} ` : "";
      const mark = h("span", { class: "value" }, name, h("b", {}, figure(this.spec.name, value)), interval);
      mark.style.setProperty("--c", curve.colour);
      return mark;
    });
    replace(this.values, x === null ? null : h("span", { class: "soft" }, `${this.xLabel(x)} `), ...shown.slice(0, MAX_TOLD), shown.length > MAX_TOLD ? h("span", { class: "soft" }, ` +${shown.length - MAX_TOLD}`) : null);
  }

  private options(width: number): uPlot.Options {
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    for (const curve of this.curves) {
      const isSmooth = isSmoothed(curve, this.smoothing);
      const few = curve.y.length < 40;
      const stroke = curve.colour;
      const dash = curve.dash ?? [];
      series.push({ stroke: isSmooth ? `${stroke}55` : stroke, width: isSmooth ? 1 : 1.75, dash, spanGaps: !curve.hasGaps, points: { show: few && !isSmooth, size: 5, fill: stroke } });
      if (isSmooth) series.push({ stroke, width: 2, dash, spanGaps: true, points: { show: false } });
      if (curve.low && curve.high) {
        series.push({ stroke: "transparent", spanGaps: true, points: { show: false } }, { stroke: "transparent", spanGaps: true, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}30` });
      }
    }
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const x = this.table[0] as number[];
    return {
      width,
      height: 170,
      legend: { show: false },
      series,
      bands,
      scales: { x: { time: false, range: () => this.range ?? ends(x) }, y: { range: (_, low, high) => yRange(this.spec.name, low, high) } },
      axes: [
        { ...axis, size: 22, incrs: x.every(Number.isInteger) ? WHOLE : TENS, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(6)))) },
        { ...axis, size: 54, ...(/bytes/.test(this.spec.name) ? { incrs: TWOS } : {}), values: (_, ticks) => ticks.map((tick) => figure(this.spec.name, tick)) },
      ],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        setCursor: [(plot) => this.moved(plot)],
        setSelect: [(plot) => this.selected(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.onzoom(null))],
      },
    };
  }

  private moved(plot: uPlot): void {
    const left = plot.cursor.left ?? -1;
    if (!plot.cursor.event) return;
    this.onpoint(left < 0 ? null : plot.posToVal(left, "x"));
  }

  private selected(plot: uPlot): void {
    if (plot.select.width < 4) return;
    const range: [number, number] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onzoom(range);
  }
}

/** A single point stands in the middle. */
function ends(x: number[]): [number, number] {
  const [first, last] = [x[0] ?? 0, x[x.length - 1] ?? 1];
  return first === last ? [first - 1, last + 1] : [first, last];
}

/** Shares span 0 to 1, so that plots of different runs compare. */
function yRange(name: string, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (/accuracy|pass@|truncated|\/ess$|gpu \d|host\/(cpu|memory|disk)/.test(name) && low >= 0 && high <= 1.0001) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function aligned(curves: Curve[], smoothing: number): uPlot.AlignedData {
  const all = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(all.map((x, i) => [x, i]));
  const columns: (number | null | undefined)[][] = [];
  for (const curve of curves) {
    const spread = (values: (number | null)[]) => {
      const column: (number | null | undefined)[] = new Array(all.length).fill(undefined);
      curve.x.forEach((x, i) => (column[place.get(x)!] = values[i] ?? null));
      // A gap lasts until the curve's own next point, whatever others have in between.
      if (curve.hasGaps) column.forEach((value, i) => value === undefined && i && column[i - 1] === null && (column[i] = null));
      return column;
    };
    columns.push(spread(curve.y));
    if (isSmoothed(curve, smoothing)) columns.push(spread(smoothed(curve.y, smoothing)));
    if (curve.low && curve.high) columns.push(spread(curve.low), spread(curve.high));
  }
  return [all, ...columns] as uPlot.AlignedData;
}

/** A few points, or points with intervals, stand for themselves. */
function isSmoothed(curve: Curve, smoothing: number): boolean {
  return smoothing > 0 && curve.y.length > 12 && !curve.low;
}

/** An exponential mean, corrected for its start. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let [mean, share] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

export function lastOf(values: (number | null)[]): number | null {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i]!;
  return null;
}

function nearest(x: number[], at: number): number {
  let best = -1;
  x.forEach((value, i) => {
    if (best < 0 || Math.abs(value - at) < Math.abs(x[best]! - at)) best = i;
  });
  return best;
}
