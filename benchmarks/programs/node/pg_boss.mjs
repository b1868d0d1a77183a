// pg-boss, with LISTEN/NOTIFY and with workers that fetch on without a pause while their batches are full.
//
// install: create its tables and the queue. enqueue N: `insert` in pieces. work BATCH CONCURRENCY, stamp ...: handle
// jobs until SIGTERM. produce RATE COUNT: one job per transaction.

import { database, goSignal, load, produce, recorder, say, timed, TOPIC, untilStopped } from "./shared.mjs";

const { PgBoss } = load("pg-boss");

const PIECE = 10_000;
const [mode, ...numbers] = process.argv.slice(2);
const go = goSignal();
const recording = recorder(mode);
const works = mode === "work" || mode === "stamp";
const boss = new PgBoss({
  ...database,
  max: 20,
  useListenNotify: works,
  supervise: works,
  schedule: false,
  migrate: mode === "install",
});
boss.on("error", (error) => process.stderr.write(`${error}\n`));

if (!works) {
  await boss.start();
  if (mode === "install") {
    await boss.createQueue(TOPIC, { notify: true });
    say({ installed: true });
  } else if (mode === "enqueue") {
    const count = Number(numbers[0]);
    const jobs = Array.from({ length: count }, (_, n) => ({ data: { user_id: n } }));
    await timed(count, async () => {
      for (let start = 0; start < count; start += PIECE) await boss.insert(TOPIC, jobs.slice(start, start + PIECE));
    });
  } else {
    await produce(Number(numbers[0]), Number(numbers[1]), (n) => boss.send(TOPIC, { user_id: n }));
  }
} else {
  const [batchSize, localConcurrency] = numbers.map(Number);
  const stopped = untilStopped();
  say({ ready: true });
  if (mode === "work") await go;
  await boss.start();
  await boss.work(
    TOPIC,
    { batchSize, localConcurrency, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 },
    async (jobs) => {
      for (const job of jobs) recording.handle(job.data.user_id);
    },
  );
  await stopped;
}
await boss.stop({ graceful: works, timeout: 10_000 });
if (works) recording.report();
process.exit(0);
