//! The files of the dashboard, embedded in the program.

/// A file: its path, content type and content.
pub(super) type Asset = (&'static str, &'static str, &'static str);

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

pub(super) const ASSETS: [Asset; 15] = [
    ("/", "text/html; charset=utf-8", include_str!("assets/index.html")),
    ("/dashboard.css", STYLE, include_str!("assets/dashboard.css")),
    ("/dashboard.js", SCRIPT, include_str!("assets/dashboard.js")),
    ("/server.js", SCRIPT, include_str!("assets/server.js")),
    ("/format.js", SCRIPT, include_str!("assets/format.js")),
    ("/curves.js", SCRIPT, include_str!("assets/curves.js")),
    ("/samples.js", SCRIPT, include_str!("assets/samples.js")),
    ("/ask.js", SCRIPT, include_str!("assets/ask.js")),
    ("/settings.js", SCRIPT, include_str!("assets/settings.js")),
    ("/parallel.js", SCRIPT, include_str!("assets/parallel.js")),
    ("/tasks.js", SCRIPT, include_str!("assets/tasks.js")),
    ("/devices.js", SCRIPT, include_str!("assets/devices.js")),
    ("/memory.js", SCRIPT, include_str!("assets/memory.js")),
    ("/uplot.js", SCRIPT, include_str!("assets/uplot/uPlot.iife.min.js")),
    ("/uplot.css", STYLE, include_str!("assets/uplot/uPlot.min.css")),
];
