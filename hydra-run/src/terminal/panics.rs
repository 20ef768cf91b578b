//! Panics of worker threads, which the engine turns into errors.

/// Keeps the default panic hook from printing between progress bars: the engine reports the panics of its threads as errors.
pub fn keep_workers_quiet() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("hydra-")) {
            default(info);
        }
    }));
}
