// graphile-worker with the settings of its performance page: a local queue of 500 and completions in batches.
//
// install: create its tables. enqueue N: one `addJobs` call. work CONCURRENCY LOCAL_QUEUE, stamp ...: handle jobs until
// SIGTERM.

import { database, goSignal, load, recorder, say, timed, TOPIC, untilStopped } from "./shared.mjs";

const { Logger, makeWorkerUtils, run } = load("graphile-worker");
const { Pool } = load("pg");

const [mode, ...numbers] = process.argv.slice(2);
const go = goSignal();
const pgPool = new Pool({ ...database, max: 30 });
// Every job's success is logged otherwise.
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") process.stderr.write(`${message}\n`);
});

if (mode === "install" || mode === "enqueue") {
  const utils = await makeWorkerUtils({ pgPool, logger });
  if (mode === "install") {
    await utils.migrate();
    say({ installed: true });
  } else {
    const count = Number(numbers[0]);
    const jobs = Array.from({ length: count }, (_, n) => ({ identifier: TOPIC, payload: { user_id: n } }));
    await timed(count, () => utils.addJobs(jobs));
  }
  await utils.release();
} else {
  const [concurrentJobs, size] = numbers.map(Number);
  const recording = recorder(mode);
  const stopped = untilStopped();
  say({ ready: true });
  if (mode === "work") await go;
  const runner = await run({
    pgPool,
    logger,
    noHandleSignals: true,
    taskList: { [TOPIC]: async (payload) => recording.handle(payload.user_id) },
    preset: {
      worker: {
        concurrentJobs,
        maxPoolSize: concurrentJobs + 1,
        localQueue: { size },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  await stopped;
  await runner.stop();
  recording.report();
}
await pgPool.end();
process.exit(0);
