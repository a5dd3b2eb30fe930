// What the server answers and the report embeds: the shapes of rill/dashboard/pages.py, timeline.py and rollouts.py.

export interface RunSummary {
  key: string;
  name: string;
  status: "running" | "finished" | "failed" | "interrupted" | "unknown";
  message: string;
  step: number;
  headline: string;
  value: number | null;
  started_s: number;
  lasted_s: number;
  version: number;
  /** The share of the logs that is indexed; null where it was not asked for. */
  indexed: number | null;
}

export interface Finding {
  guard: string;
  step: number;
  action: string;
  seen: string;
  meaning: string;
}

export interface Overview extends RunSummary {
  findings: Finding[];
  machine: Record<string, string>;
  card: { question: string; answer: string }[];
  shares: [string, number][];
  num_steps: number | null;
  resume: string;
}

export interface Metrics {
  version: number;
  x?: number[][];
  series?: Record<string, { x: number; y: (number | null)[] }>;
  steps?: number[];
  times?: number[];
}

export interface TimelineQuery {
  from: number;
  to: number;
  columns: number;
  lane: number;
  lanes: number;
}

/** lane, name, start, seconds, process, offset, kind (1: an instant, 2: unfinished) */
export type Span = [number, number, number, number, number, number, number];

export interface TimelineView {
  kind: "spans" | "columns";
  from_s: number;
  to_s: number;
  seconds: number;
  begin_s: number;
  num_lanes: number;
  lanes: { process: string; lane: string }[];
  busy: number[];
  names: string[];
  spans?: Span[];
  chunks?: [number, string][];
  columns?: [number, number, number[]][];
  full?: number;
}

export interface GroupRow {
  log: number;
  place: number;
  step: number;
  task: string;
  preview: string;
  reward: number | null;
  rewards: (number | null)[];
  stops: string[];
  num_sampled: number[];
  num_failed: number;
  is_dropped: boolean;
}

export interface Facets {
  num_groups: number;
  num_samples: number;
  steps: [number, number, number][];
  tasks: string[];
  stops: string[];
  tags: string[];
}

export interface RolloutPage {
  total: number;
  groups: GroupRow[];
  searched: number;
  text_bytes: number;
  facets?: Facets;
}

export interface Turn {
  role: string;
  start: number;
  end: number;
}

export interface Media {
  path: string;
  kind?: string;
  caption?: string;
  data?: string;
}

export interface Sample {
  id: string;
  reward: number | null;
  parts?: Record<string, number>;
  stop?: string;
  error?: string | null;
  tokens: string[];
  sampled: number[];
  logprobs?: number[];
  versions?: number[];
  advantages?: (number | null)[];
  entropies?: (number | null)[];
  trainer_logprobs?: (number | null)[];
  mask?: number[];
  turns?: Turn[];
  tags?: string[];
  media?: Media[];
  num_tokens?: number;
}

export interface Group {
  group: string;
  prompt_id?: string;
  task?: string;
  answer?: unknown;
  dropped?: string | null;
  version: number;
  /** The evaluation set it is of. */
  evaluates?: string;
  step: number;
  log: number;
  place: number;
  tags?: string[];
  samples: Sample[];
}

export interface ConfigPage {
  rows: [string, string, string][];
  problem: string;
}

export interface GuardsPage {
  findings: Finding[];
  log: string;
}

export interface CounterSeries {
  process: string;
  name: string;
  x: number[];
  y: (number | null)[];
}

export interface FlowNode {
  id: string;
  label?: string;
  devices?: string;
  items_per_s?: number;
  busy?: number;
}

export interface FlowEdge {
  from: string;
  to: string;
  channel?: string;
  items_per_s?: number;
  depth?: number;
  capacity?: number;
}

export interface FlowPage {
  flow: { nodes?: FlowNode[]; edges?: FlowEdge[]; bottleneck?: string; problem?: string } | null;
  plan: {
    chosen?: string;
    why?: string[];
    predicted_step_s?: number;
    alternatives?: { name: string; why?: string }[];
    lanes?: { lane: string; name: string; start_s: number; end_s: number }[];
    problem?: string;
  } | null;
}
