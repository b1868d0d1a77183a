// Shared by the programs on Node.js: the modules of the cache, the database, their end with the parent, and the
// tally of handled jobs. Each function is like its namesake in `lifeline.py`, with the same lines of JSON.

import { createRequire } from "node:module";

export const TOPIC = "mail.activation";
export const load = createRequire(process.env.PGOUTBOX_BENCH_MODULES);

export const database = {
  host: process.env.PGHOST,
  port: Number(process.env.PGPORT ?? 5432),
  user: process.env.PGUSER,
  password: process.env.PGPASSWORD,
  database: process.env.PGDATABASE,
};

const TALLY_STEP = 250;

// The clock that all processes share: CLOCK_MONOTONIC, in seconds.
export const now = () => Number(process.hrtime.bigint()) * 1e-9;

export const say = (fields) => process.stdout.write(`${JSON.stringify(fields)}\n`);

// Resolves when the parent says go. When standard input ends, so does this process.
export const goSignal = () =>
  new Promise((resolve) => {
    process.stdin.on("data", () => resolve());
    process.stdin.on("end", () => process.exit(1));
  });

export const untilStopped = () => new Promise((resolve) => process.on("SIGTERM", () => resolve()));

export class Tally {
  total = 0;

  count() {
    if (this.total === 0) say({ first_at: now() });
    this.total += 1;
    if (this.total % TALLY_STEP === 0) say({ handled_count: TALLY_STEP });
  }

  report() {
    say({ total_count: this.total });
  }
}

// The handler of a job, and its report at the end, by the mode: work counts, stamp records the time.
export const recorder = (mode) => {
  const tally = new Tally();
  const startedAt = [];
  return {
    handle: mode === "stamp" ? (number) => startedAt.push([number, now()]) : () => tally.count(),
    report: () => (mode === "stamp" ? say({ started_at: startedAt }) : tally.report()),
  };
};

export const timed = async (count, enqueue) => {
  const beganAt = now();
  await enqueue();
  say({ seconds: now() - beganAt, count });
};

// Produce one job at a random moment of each interval, like `produce.py`; report when each was sent and answered.
export const produce = async (rate, count, enqueue) => {
  const produced = [];
  const start = now() + 1 / rate;
  for (let number = 0; number < count; number += 1) {
    const dueAt = start + (number + Math.random()) / rate;
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, 1000 * (dueAt - now()))));
    const sentAt = now();
    await enqueue(number);
    produced.push([number, sentAt, now()]);
  }
  say({ produced });
};
