// The chosen theme, before the first paint. A classic script: modules run after it.
(() => {
  try {
    const theme = localStorage.getItem("jaxserve:theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is blocked: the system's theme it is.
  }
})();
