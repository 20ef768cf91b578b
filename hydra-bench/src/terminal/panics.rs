//! Panics of workers, which the engine makes errors of.

/// The engine reports what a layer's panic says; the default hook would print it among the bars.
pub(crate) fn keep_workers_quiet() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("hydra-")) {
            default(info);
        }
    }));
}
