//! The terminal dashboard: a live view of a run's losses, leaderboard, devices and memory.
//! It may read run directories and draw in the terminal.
//! It never writes a file and never sends a command to a run.

mod draw;
mod view;

use anyhow::{Context, Result, ensure};
use hydra_run::terminal::interactive;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;
use view::View;

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the run in a directory until the user quits.
pub(crate) fn watch(dir: &Path) -> Result<()> {
    let shown = dir.display();
    ensure!(
        std::io::stdout().is_terminal() && std::io::stdin().is_terminal() && interactive(),
        "hydra watch needs a terminal: use hydra report {shown} or hydra serve {shown} instead"
    );
    let mut view = View::new(dir)?;
    let mut terminal = ratatui::try_init().context("cannot draw in the terminal")?;
    let watched = until_quit(&mut terminal, &mut view);
    ratatui::restore();
    watched
}

fn until_quit(terminal: &mut DefaultTerminal, view: &mut View) -> Result<()> {
    loop {
        view.refresh()?;
        terminal.draw(|frame| draw::all(frame, view)).context("cannot draw in the terminal")?;
        while event::poll(POLL_INTERVAL).context("cannot read keys from the terminal")? {
            if let Event::Key(key) = event::read().context("cannot read keys from the terminal")?
                && key.is_press()
            {
                let interrupts =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if interrupts || !view.handle_key(key.code) {
                    return Ok(());
                }
            }
            terminal.draw(|frame| draw::all(frame, view)).context("cannot draw in the terminal")?;
        }
    }
}
