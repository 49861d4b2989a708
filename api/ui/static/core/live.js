/** Keeps a page up to date as long as somebody looks at it. */

import { Problem, Unreachable } from "./api.js";
import { connection } from "./connection.js";

const MAX_WAIT_SECONDS = 15;

/**
 * Calls `refresh(signal)` again and again, `seconds` after it has ended, until it returns true (nothing will ever change
 * again) or the page is left. Rests while the page is not visible. Says so while the service does not answer, and tries
 * again ever more seldom.
 */
export class Live {
  constructor(refresh, seconds = 1) {
    this.refresh = refresh;
    this.seconds = seconds;
    this.failures = 0;
    this.done = false;
    this.timer = null;
    this.running = null;
    this.aborter = new AbortController();
    this.onVisible = () => !document.hidden && this.now();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  /** Refresh for the first time; resolves when that is over, whatever came of it. */
  async start() {
    await this.now();
  }

  /** Refresh at once: something has changed. While a refresh is under way another one follows it. */
  async now() {
    if (this.running) {
      this.again = true;
      return this.running;
    }
    clearTimeout(this.timer);
    this.running = this.turn();
    await this.running;
    this.running = null;
    if (this.aborter.signal.aborted) return undefined;
    if (this.again) {
      this.again = false;
      return this.now();
    }
    if (!this.done && !document.hidden) this.timer = setTimeout(() => this.now(), 1000 * this.pause());
    return undefined;
  }

  async turn() {
    try {
      this.done = (await this.refresh(this.aborter.signal)) === true;
      this.failures = 0;
      connection.works();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem || error instanceof Unreachable)) reportError(error); // a defect of ours
      this.failures += 1;
      connection.fails(error);
    }
  }

  pause() {
    return this.failures ? Math.min(MAX_WAIT_SECONDS, this.seconds * 2 ** (this.failures - 1)) : this.seconds;
  }

  /** The page is left. */
  stop() {
    clearTimeout(this.timer);
    this.aborter.abort();
    document.removeEventListener("visibilitychange", this.onVisible);
  }
}
