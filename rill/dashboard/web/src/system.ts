// Processor, memory, accelerators, disk and network over time, by process.

import { colourOf, duration, empty, h, replace } from "./dom";
import type { Context, Mounted } from "./main";
import { PlotBoard } from "./plots";
import type { CounterSeries } from "./types";

const KNOWN: Record<string, [string, string]> = {
  "process/cpu": ["Processor cores", "in use, by process"],
  "process/memory_bytes": ["Memory", "resident, by process"],
  "host/cpu": ["All processors", "share in use, by machine"],
  "host/memory": ["Memory of the machine", "share in use"],
  "host/disk": ["Disk of the run folder", "share in use"],
  "host/net_in_bytes_per_s": ["Network in", "by machine"],
  "host/net_out_bytes_per_s": ["Network out", "by machine"],
};

export function systemPage(root: HTMLElement, context: Context): Mounted {
  let board: PlotBoard | null = null;
  let size = -1;
  const load = async () => {
    try {
      const { series } = await context.source.system(context.run.key);
      const now = series.reduce((sum, one) => sum + one.x.length + (one.x[one.x.length - 1] ?? 0), 0);
      if (now === size) return;
      size = now;
      draw(series);
    } catch (error) {
      replace(root, h("p", { class: "problem" }, (error as Error).message));
    }
  };
  const draw = (series: CounterSeries[]) => {
    board?.close();
    board = new PlotBoard((x) => duration(x), null, () => {});
    const names = [...new Set(series.map((one) => one.name))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    const plots = names.map((name) => {
      const curves = series.filter((one) => one.name === name).map((one, i) => ({ label: one.process, colour: colourOf(i), x: one.x, y: one.y, hasGaps: true }));
      const [title, what] = KNOWN[name] ?? [name, "counter of the trace"];
      return board!.add({ title, what, name }, curves, 0);
    });
    replace(root, h("h2", {}, "System"), plots.length ? h("div", { class: "plots" }, ...plots) : empty("Nothing measured yet. Every process of a run writes what it uses into its trace, every five seconds; runs of an older rill have not."), h("p", { class: "soft" }, plots.length ? "Seconds since the run's first event." : ""));
  };
  void load();
  return { refresh: () => void load(), close: () => board?.close() };
}

function rank(name: string): number {
  const order = ["gpu", "process/cpu", "process/memory", "host"];
  const at = order.findIndex((one) => name.startsWith(one));
  return at < 0 ? order.length : at;
}
