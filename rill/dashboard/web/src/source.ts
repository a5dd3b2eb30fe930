// Where the pages have their data from: a server that reads run folders, or the data inside a report.

import type { ConfigPage, CounterSeries, FlowPage, Group, GroupRow, GuardsPage, Metrics, Overview, RolloutPage, RunSummary, TimelineQuery, TimelineView } from "./types";

export interface Source {
  readonly isLive: boolean;
  /** `watch`: the runs that are shown. */
  runs(watch?: string[]): Promise<RunSummary[]>;
  overview(key: string): Promise<Overview>;
  metrics(key: string, version: number): Promise<Metrics>;
  timeline(key: string, query: TimelineQuery, signal?: AbortSignal): Promise<TimelineView>;
  span(key: string, process: number, offset: number): Promise<Record<string, unknown>>;
  rollouts(key: string, query: Record<string, string>, signal?: AbortSignal): Promise<RolloutPage>;
  group(key: string, log: number, place: number): Promise<Group>;
  prompt(key: string, id: string): Promise<{ groups: GroupRow[] }>;
  config(key: string): Promise<ConfigPage>;
  guards(key: string): Promise<GuardsPage>;
  system(key: string): Promise<{ series: CounterSeries[] }>;
  flow(key: string): Promise<FlowPage>;
  mediaAddress(key: string, path: string): string;
}

export class Server implements Source {
  readonly isLive = true;

  async runs(watch: string[] = []): Promise<RunSummary[]> {
    return (await this.get<{ runs: RunSummary[] }>(`/api/runs?${ask({ watch: watch.join() })}`)).runs;
  }
  overview = (key: string) => this.get<Overview>(this.path(key, ""));
  metrics = (key: string, version: number) => this.get<Metrics>(this.path(key, `/metrics?version=${version}`));
  timeline = (key: string, query: TimelineQuery, signal?: AbortSignal) => this.get<TimelineView>(this.path(key, `/timeline?${ask(query)}`), signal);
  span = (key: string, process: number, offset: number) => this.get<Record<string, unknown>>(this.path(key, `/span?${ask({ process, offset })}`));
  rollouts = (key: string, query: Record<string, string>, signal?: AbortSignal) => this.get<RolloutPage>(this.path(key, `/rollouts?${ask(query)}`), signal);
  group = (key: string, log: number, place: number) => this.get<Group>(this.path(key, `/group?${ask({ log, place })}`));
  prompt = (key: string, id: string) => this.get<{ groups: GroupRow[] }>(this.path(key, `/prompt?${ask({ id })}`));
  config = (key: string) => this.get<ConfigPage>(this.path(key, "/config"));
  guards = (key: string) => this.get<GuardsPage>(this.path(key, "/guards"));
  system = (key: string) => this.get<{ series: CounterSeries[] }>(this.path(key, "/system"));
  flow = (key: string) => this.get<FlowPage>(this.path(key, "/flow"));
  mediaAddress = (key: string, path: string) => this.path(key, `/media/${path.split("/").map(encodeURIComponent).join("/")}`);

  private path(key: string, rest: string): string {
    return `/api/run/${encodeURIComponent(key)}${rest}`;
  }

  private async get<T>(address: string, signal?: AbortSignal): Promise<T> {
    let [status, text] = [0, ""];
    try {
      const answer = await fetch(address, { signal: signal ?? null });
      [status, text] = [answer.status, await answer.text()];
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new Error("the dashboard does not answer: has `rill dashboard` ended? This page goes on when it is back.");
    }
    if (status === 200) return JSON.parse(text) as T;
    const words = /"problem":"/.test(text) ? (JSON.parse(text) as { problem: string }).problem : `the dashboard answered ${status}`;
    throw new Error(words);
  }
}

/** What rill/dashboard/report.py embeds. */
export interface Report {
  overview: Overview;
  metrics: Metrics;
  timeline: TimelineView;
  spans: Record<string, unknown>;
  rollouts: Group[];
  num_recorded: number;
  config: ConfigPage;
  guards: GuardsPage;
  system: { series: CounterSeries[] };
  flow: FlowPage;
}

export class Embedded implements Source {
  readonly isLive = false;
  constructor(private readonly report: Report) {}

  runs = async () => [this.report.overview];
  overview = async () => this.report.overview;
  metrics = async () => this.report.metrics;
  timeline = async () => this.report.timeline;
  span = async (_: string, process: number, offset: number) => (this.report.spans[`${process}:${offset}`] ?? {}) as Record<string, unknown>;
  group = async (_: string, __: number, place: number) => {
    const found = this.report.rollouts[place];
    if (!found) throw new Error("this report does not hold that group");
    return found;
  };
  prompt = async (_: string, id: string) => ({ groups: this.rows().filter((row) => this.report.rollouts[row.place]?.prompt_id === id) });
  config = async () => this.report.config;
  guards = async () => this.report.guards;
  system = async () => this.report.system;
  flow = async () => this.report.flow;
  mediaAddress = () => "";

  async rollouts(_: string, query: Record<string, string>): Promise<RolloutPage> {
    const fits = this.rows().filter((row) => this.fits(row, query));
    inOrder(fits, query.order);
    const first = Number(query.first ?? 0);
    return { total: fits.length, groups: fits.slice(first, first + Number(query.count ?? 50)), searched: 0, text_bytes: 0, facets: this.facets() };
  }

  private fits(row: GroupRow, query: Record<string, string>): boolean {
    const group = this.report.rollouts[row.place]!;
    const { from, to, min, max } = query;
    if (from && row.step < Number(from)) return false;
    if (to && row.step > Number(to)) return false;
    if (query.task && row.task !== query.task) return false;
    if (query.prompt && group.prompt_id !== query.prompt) return false;
    if (query.only === "dropped" && !row.is_dropped) return false;
    const sampleFits = group.samples.some((sample) => {
      const reward = sample.reward ?? NaN;
      if (min && !(reward >= Number(min))) return false;
      if (max && !(reward <= Number(max))) return false;
      if (query.stop && sample.stop !== query.stop) return false;
      if (query.tag && ![...(sample.tags ?? []), ...(group.tags ?? [])].includes(query.tag)) return false;
      return query.only !== "failed" || Boolean(sample.error);
    });
    if (!sampleFits) return false;
    const text = query.text?.toLowerCase();
    return !text || group.samples.some((sample) => sample.tokens.join("").toLowerCase().includes(text));
  }

  private rows(): GroupRow[] {
    return this.report.rollouts.map((group, place) => ({
      log: 0,
      place,
      step: group.step,
      task: dataOf(group),
      preview: promptOf(group).slice(0, 160),
      reward: mean(group.samples.map((sample) => sample.reward)),
      rewards: group.samples.map((sample) => sample.reward),
      stops: group.samples.map((sample) => sample.stop ?? ""),
      num_sampled: group.samples.map((sample) => sample.sampled.filter(Boolean).length),
      num_failed: group.samples.filter((sample) => sample.error).length,
      is_dropped: Boolean(group.dropped),
    }));
  }

  private facets() {
    const groups = this.report.rollouts;
    const steps = new Map<number, (number | null)[]>();
    for (const group of groups) if (!group.evaluates) steps.set(group.step, [...(steps.get(group.step) ?? []), ...group.samples.map((sample) => sample.reward)]);
    const all = (values: string[]) => [...new Set(values)].sort();
    return {
      num_groups: this.report.num_recorded,
      num_samples: groups.reduce((sum, group) => sum + group.samples.length, 0),
      steps: [...steps].sort((a, b) => a[0] - b[0]).map(([step, rewards]): [number, number, number] => [step, groups.filter((g) => g.step === step && !g.evaluates).length, mean(rewards) ?? 0]),
      tasks: all(groups.map(dataOf)),
      stops: all(groups.flatMap((group) => group.samples.map((sample) => sample.stop ?? ""))),
      tags: all(groups.flatMap((group) => [...(group.tags ?? []), ...group.samples.flatMap((sample) => sample.tags ?? [])])),
    };
  }
}

const ORDERS: Record<string, (row: GroupRow) => number> = {
  newest: (row) => -row.step,
  oldest: (row) => row.step,
  best: (row) => -(row.reward ?? 0),
  worst: (row) => row.reward ?? 0,
  spread: (row) => Math.min(...row.rewards.map(Number)) - Math.max(...row.rewards.map(Number)),
  longest: (row) => -Math.max(...row.num_sampled),
};

/** As the server orders them. */
export function inOrder(rows: GroupRow[], order = "newest"): void {
  const key = ORDERS[order] ?? ORDERS.newest!;
  rows.sort((a, b) => key(a) - key(b) || a.log - b.log || a.place - b.place);
}

export function openingOf(sampled: number[], length: number): number {
  const at = sampled.findIndex(Boolean);
  return at < 0 ? length : at;
}

function dataOf(group: Group): string {
  return group.evaluates ? `evaluation: ${group.evaluates}` : (group.task ?? "");
}

function promptOf(group: Group): string {
  const first = group.samples[0];
  return first ? first.tokens.slice(0, openingOf(first.sampled, first.tokens.length)).join("") : "";
}

function mean(values: (number | null)[]): number | null {
  const numbers = values.filter((value): value is number => value !== null);
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
}

function ask(query: object): string {
  return new URLSearchParams(Object.entries(query).map(([name, value]): [string, string] => [name, String(value)])).toString();
}
