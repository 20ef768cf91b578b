//! A run in a terminal: its curves, its leaderboard, its devices and memory, drawn again as the run goes on.
//! It may touch run directories, which it reads, and the terminal.
//! It never writes a file and never asks a run for anything.

mod draw;
mod view;

use crate::terminal::interactive;
use anyhow::{Context, Result, ensure};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;
use view::View;

/// How often the run is looked at.
const EVERY: Duration = Duration::from_secs(1);

/// Shows the run in a directory until somebody says that it is enough.
pub(crate) fn watch(dir: &Path) -> Result<()> {
    let shown = dir.display();
    ensure!(
        std::io::stdout().is_terminal() && std::io::stdin().is_terminal() && interactive(),
        "hydra watch draws in a terminal, and here is none: see hydra report {shown}, or hydra serve {shown}"
    );
    let mut view = View::new(dir)?;
    let mut terminal = ratatui::try_init().context("the terminal could not be drawn in")?;
    let watched = until_quit(&mut terminal, &mut view);
    ratatui::restore();
    watched
}

fn until_quit(terminal: &mut DefaultTerminal, view: &mut View) -> Result<()> {
    loop {
        view.look()?;
        terminal.draw(|frame| draw::all(frame, view)).context("the terminal could not be drawn in")?;
        while event::poll(EVERY).context("no keys can be read")? {
            if let Event::Key(key) = event::read().context("no keys can be read")?
                && key.is_press()
            {
                let interrupts =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if interrupts || !view.takes(key.code) {
                    return Ok(());
                }
            }
            terminal.draw(|frame| draw::all(frame, view)).context("the terminal could not be drawn in")?;
        }
    }
}
