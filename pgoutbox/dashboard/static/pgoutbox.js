// Shows times in the time zone of the browser, copies texts, and refreshes the server-rendered parts of a page when the
// server reports a change. Without this script, every page still works after a manual reload, in UTC.
"use strict";

// Swedish dates are those of ISO 8601.
const LOCAL = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const ZONE = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" });

function localize(page) {
  for (const time of page.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    const zone = ZONE.formatToParts(moment).find((part) => part.type === "timeZoneName").value;
    const local = `${LOCAL.format(moment)} ${zone}`;
    const shown = time.querySelector("small") ?? time;
    if (shown.textContent.endsWith(" UTC")) shown.textContent = local;
    time.title = `${local}, ${moment.toISOString().slice(0, 19).replace("T", " ")} UTC`;
  }
}

localize(document);

// Browsers offer the clipboard only to pages over HTTPS, and of this machine.
if (navigator.clipboard) {
  document.documentElement.classList.add("copies");
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (button === null) return;
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).textContent);
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 2000);
  });
}

(() => {
  const MIN_AGE = 2000;
  const MAX_AGE = 20000;
  const RETRY = 15000;
  const live = document.getElementById("live");
  const parts = () => document.querySelectorAll("[data-part][id]");
  let stale = false;
  let busy = false;
  let fetchedAt = Date.now();
  let stopped = false;

  function showStatus(text, lost) {
    if (live.textContent !== text) live.textContent = text;
    live.classList.toggle("lost", lost);
  }

  function isInUse(part) {
    const selection = document.getSelection();
    return (
      part.contains(document.activeElement) ||
      part.querySelector("details[open] form, [name=ids]:checked") !== null ||
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
      localize(fresh);
      for (const part of parts()) {
        const other = fresh.getElementById(part.id);
        if (other === null) continue;
        for (const drawer of part.querySelectorAll("details[id]")) {
          const same = other.querySelector(`#${CSS.escape(drawer.id)}`);
          if (same !== null) same.open = drawer.open;
        }
        if (part.isEqualNode(other)) continue;
        if (isInUse(part)) isPaused = true;
        else part.replaceWith(document.importNode(other, true));
      }
      stale ||= isPaused;
      if (isPaused) showStatus("Paused while in use", true);
      else showStatus(...(source === null ? ["Every 20 s", true] : ["Live", false]));
    } catch {
      showStatus("No answer", true);
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
    showStatus(text, true);
  }

  // Over HTTP/1.1 a browser opens at most six connections to a server. A hidden page must not keep one open.
  function follow() {
    if (stopped || document.hidden || source !== null) return;
    const opened = new EventSource(document.body.dataset.live);
    source = opened;
    opened.addEventListener("open", () => showStatus("Live", false));
    opened.addEventListener("change", () => { stale = true; });
    opened.addEventListener("replaced", () => {
      leave();
      showStatus("Every 20 s", true);
    });
    opened.addEventListener("error", () => {
      showStatus("Disconnected", true);
      // The browser does not reconnect by itself if the answer was not a stream.
      if (opened.readyState !== EventSource.CLOSED) return;
      leave();
      setTimeout(follow, RETRY);
    });
  }

  function refreshIfStale() {
    if (stopped || busy || document.hidden) return;
    const age = Date.now() - fetchedAt;
    const isPressing = document.querySelector("[data-refresh]") !== null;
    if (age >= MIN_AGE && (stale || isPressing || age >= MAX_AGE)) void refresh();
  }

  // The warnings of redirects are on every page, and alone keep no connection open.
  if ([...parts()].some((part) => part.id !== "redirects")) {
    follow();
    setInterval(refreshIfStale, 500);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) leave();
      follow();
      refreshIfStale();
    });
    addEventListener("focus", follow);
    // Otherwise a page from the back-forward cache considers itself connected.
    addEventListener("pagehide", leave);
    addEventListener("pageshow", follow);
  }
})();
