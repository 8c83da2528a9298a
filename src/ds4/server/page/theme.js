// Before the first paint, so that the page does not flash in the other colours.
(() => {
  try {
    const theme = localStorage.getItem("ds4.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be forbidden; the system's colours do then.
  }
})();
