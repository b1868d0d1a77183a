// Replaces the parts of a page that the server renders, when the server says that something changed. Without this
// script every page works; it only has to be reloaded by hand.
"use strict";

(() => {
  const PAUSE = 2000;
  const WITHOUT_NEWS = 20000;
  const RETRY = 15000;
  const live = document.getElementById("live");
  const parts = () => document.querySelectorAll("[data-part][id]");
  let stale = false;
  let busy = false;
  let fetchedAt = Date.now();
  let stopped = false;

  function tell(text, lost) {
    if (live.textContent !== text) live.textContent = text;
    live.classList.toggle("lost", lost);
  }

  function isInUse(part) {
    const selection = document.getSelection();
    return (
      part.contains(document.activeElement) ||
      (selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode))
    );
  }

  async function refresh() {
    busy = true;
    stale = false;
    fetchedAt = Date.now();
    try {
      const url = new URL(location.href);
      url.searchParams.delete("done");
      url.hash = "";
      const answer = await fetch(url, { headers: { Accept: "text/html", "X-Pgoutbox-Live": "1" }, redirect: "error" });
      if (answer.status === 401 || answer.status === 403) {
        stop("Signed out");
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      let isPaused = false;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of parts()) {
        const other = fresh.getElementById(part.id);
        if (other === null || part.isEqualNode(other)) continue;
        if (isInUse(part)) isPaused = true;
        else part.replaceWith(document.importNode(other, true));
      }
      stale ||= isPaused;
      if (isPaused) tell("Paused where you are", true);
      else tell(...(source === null ? ["Every 20 s", true] : ["Live", false]));
    } catch {
      tell("No answer", true);
      stale = true;
    } finally {
      busy = false;
    }
  }

  let source = null;

  function leave() {
    if (source !== null) source.close();
    source = null;
  }

  function stop(text) {
    stopped = true;
    leave();
    tell(text, true);
  }

  // A browser has six connections to a server over HTTP/1.1. A hidden page must not keep one of them.
  function follow() {
    if (stopped || document.hidden || source !== null) return;
    const opened = new EventSource(document.body.dataset.live);
    source = opened;
    opened.addEventListener("open", () => tell("Live", false));
    opened.addEventListener("change", () => { stale = true; });
    opened.addEventListener("replaced", () => {
      leave();
      tell("Every 20 s", true);
    });
    opened.addEventListener("error", () => {
      tell("Not live", true);
      // After an answer other than a stream the browser does not try again by itself.
      if (opened.readyState !== EventSource.CLOSED) return;
      leave();
      setTimeout(follow, RETRY);
    });
  }

  function look() {
    if (stopped || busy || document.hidden) return;
    const age = Date.now() - fetchedAt;
    const isPressing = document.querySelector("[data-refresh]") !== null;
    if (age >= PAUSE && (stale || isPressing || age >= WITHOUT_NEWS)) void refresh();
  }

  if (parts().length > 0) {
    follow();
    setInterval(look, 500);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) leave();
      follow();
      look();
    });
    addEventListener("focus", follow);
    // Else going back finds a page that thinks it is still connected.
    addEventListener("pagehide", leave);
    addEventListener("pageshow", follow);
  }
})();
