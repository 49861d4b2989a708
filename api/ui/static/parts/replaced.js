/** Ranks that got a new process while a viewer was looking: shown for a while, since a recovery is over in a second. */

const SHOWN_MILLISECONDS = 10_000;

/** Remembers which recoveries were there when the page was opened. */
export class Replaced {
  constructor() {
    this.known = null;
    this.since = new Map();
  }

  /** Take note of a job's recoveries as they are now, at `now` by the viewer's clock. */
  note(recoveries, now = Date.now()) {
    // Of one that has only begun it is not known yet who gets a new process.
    const launched = recoveries.filter((each) => each.forked.length + each.kept > 0);
    const newest = launched.reduce((most, each) => Math.max(most, each.generation), 0);
    if (this.known !== null) {
      for (const recovery of launched.filter((each) => each.generation > this.known)) {
        for (const rank of recovery.forked) this.since.set(rank, { at: now, cause: recovery.cause });
      }
    }
    this.known = Math.max(this.known ?? 0, newest);
  }

  /** By rank, why it was replaced a moment ago. */
  causes(now = Date.now()) {
    return new Map(
      [...this.since].filter(([, { at }]) => now - at < SHOWN_MILLISECONDS).map(([rank, { cause }]) => [rank, cause]),
    );
  }
}
