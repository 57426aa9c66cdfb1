// The server's /metrics: Prometheus' text as numbers, and what changed between two readings.

const PREFIX = "jaxserve:";
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of our own metrics, by name without the prefix: [{labels, value}]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const match = SAMPLE.exec(line);
    if (!match) continue;
    const name = match[1].slice(PREFIX.length);
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, key, value]) => [key, value]));
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** One reading: gauges as they are, counters and histograms as totals since the server's start. */
export function reading(text, time) {
  const samples = parseMetrics(text);
  const all = (name) => samples.get(name) ?? [];
  const sum = (name) => all(name).reduce((total, { value }) => total + value, 0);
  const most = (name) => all(name).reduce((largest, { value }) => Math.max(largest, value), 0);
  const by = (name, label) => {
    const totals = new Map();
    for (const { labels, value } of all(name)) totals.set(labels[label], (totals.get(labels[label]) ?? 0) + value);
    return totals;
  };
  const histogram = (name) => ({ buckets: by(`${name}_bucket`, "le"), sum: sum(`${name}_sum`), count: sum(`${name}_count`) });
  return {
    time,
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    cacheUsage: most("kv_cache_usage_perc"),
    generated: sum("generation_tokens_total"),
    prompted: by("prompt_tokens_by_source_total", "source").get("local_compute") ?? 0,
    queries: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    preemptions: sum("num_preemptions_total"),
    compilations: sum("compilations_total"),
    padding: sum("padding_tokens_total"),
    shapes: by("steps_total", "num_tokens"),
    steps: histogram("iteration_tokens_total"),
    ttft: histogram("time_to_first_token_seconds"),
    itl: histogram("inter_token_latency_seconds"),
    host: histogram("step_host_seconds"),
    device: histogram("step_device_seconds"),
  };
}

/** What a histogram saw between two readings: {sum, count, quantile(share)}; quantile is null where it saw nothing. */
export function between(before, after) {
  const count = after.count - before.count;
  const bounds = [...after.buckets]
    .map(([bound, total]) => [bound === "+Inf" ? Infinity : Number(bound), total - (before.buckets.get(bound) ?? 0)])
    .sort(([one], [other]) => one - other);
  return { sum: after.sum - before.sum, count, quantile: (share) => quantile(bounds, count, share) };
}

/** As Prometheus' histogram_quantile: linear within a bucket. */
function quantile(bounds, count, share) {
  if (count <= 0) return null;
  const rank = share * count;
  let lower = 0;
  let below = 0;
  for (const [bound, total] of bounds) {
    if (total >= rank) {
      if (bound === Infinity || total === below) return lower;
      return lower + ((bound - lower) * (rank - below)) / (total - below);
    }
    lower = bound;
    below = total;
  }
  return lower;
}

/** Tokens of the steps between two readings: how many were asked for, and what share of the shapes was padding. */
export function batchBetween(before, after) {
  const steps = after.steps.count - before.steps.count;
  const tokens = after.steps.sum - before.steps.sum;
  const padding = after.padding - before.padding;
  const shapes = [...after.shapes]
    .map(([size, total]) => [Number(size), total - (before.shapes.get(size) ?? 0)])
    .filter(([, total]) => total > 0)
    .sort(([one], [other]) => one - other);
  const computed = shapes.reduce((total, [size, number]) => total + size * number, 0);
  return { steps, tokens, shapes, perStep: steps ? tokens / steps : null, paddingShare: computed ? padding / computed : null };
}
