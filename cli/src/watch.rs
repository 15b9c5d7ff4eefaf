//! `watch`: what is held, as a live table.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TermionBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::termion::event::Key;
use ratatui::termion::input::TermRead as _;
use ratatui::termion::raw::IntoRawMode as _;
use ratatui::termion::screen::IntoAlternateScreen;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Table};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use signal_hook::iterator::Signals;
use syncguard::{Fence, PgLockClient, Result as Asked, hash_key};

use crate::args::{At, Watch};
use crate::connection::look;
use crate::failure::{Ended, Failure};
use crate::output::{Held, age, clock};
use crate::show::all;

/// The most leases that are shown.
const MOST: u32 = 1000;
/// How many cells the bar of a lease's rest has.
const BAR: usize = 10;

struct Sample {
    held: Vec<Held>,
    /// How many clients wait, by the hash of the key.
    waiting: BTreeMap<String, u64>,
}

enum Event {
    Sampled(Asked<Sample>),
    Key(Key),
    Resized,
    Quit,
}

#[derive(Default)]
struct View {
    sample: Option<Sample>,
    failure: Option<String>,
    /// The first row that is shown.
    top: usize,
    /// The longest rest that each lease was seen with: about its ttl.
    longest: BTreeMap<(String, Option<u32>, Fence), Duration>,
    coloured: bool,
}

pub(crate) fn watch(at: &At, watch: &Watch) -> Ended {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::Usage("`watch` needs a terminal: `syncguard list` prints once".to_owned()));
    }
    let client = look(at)?;
    let mut view = View { coloured: std::env::var_os("NO_COLOR").is_none(), ..View::default() };
    // What cannot work is told before the screen is taken.
    view.take(sample(&client)?);
    let (tell, told) = mpsc::channel();
    begin(client, watch.every.max(Duration::from_millis(100)), &tell).map_err(io_failure)?;
    let screen = io::stdout()
        .into_raw_mode()
        .and_then(IntoAlternateScreen::into_alternate_screen)
        .map_err(io_failure)?;
    let mut terminal = Terminal::new(TermionBackend::new(screen)).map_err(io_failure)?;
    loop {
        terminal.draw(|frame| view.draw(frame)).map_err(io_failure)?;
        match told.recv() {
            Ok(Event::Sampled(Ok(sample))) => view.take(sample),
            Ok(Event::Sampled(Err(error))) => view.failure = Some(error.to_string()),
            Ok(Event::Key(Key::Char('q') | Key::Esc | Key::Ctrl('c' | 'd')) | Event::Quit) | Err(_) => {
                return Ok(0);
            }
            Ok(Event::Key(key)) => view.scroll(key),
            Ok(Event::Resized) => {}
        }
    }
}

fn io_failure(error: io::Error) -> Failure {
    Failure::Io("the terminal".to_owned(), error)
}

fn sample(client: &PgLockClient) -> Asked<Sample> {
    Ok(Sample { held: all(client, MOST)?, waiting: client.operator().waiting()? })
}

/// The threads that say what happens: none of them is waited for at the end.
fn begin(client: PgLockClient, every: Duration, tell: &Sender<Event>) -> io::Result<()> {
    let run = |name: &str, work: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(format!("syncguard-{name}")).spawn(work).map(drop)
    };
    let sampled = tell.clone();
    run(
        "sample",
        Box::new(move || {
            while sampled.send(Event::Sampled(sample(&client))).is_ok() {
                thread::sleep(every);
            }
        }),
    )?;
    let typed = tell.clone();
    run(
        "keys",
        Box::new(move || {
            for key in io::stdin().keys().map_while(Result::ok) {
                if typed.send(Event::Key(key)).is_err() {
                    return;
                }
            }
            // The terminal has gone.
            let _ = typed.send(Event::Quit);
        }),
    )?;
    let heard = tell.clone();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGWINCH])?;
    run(
        "signals",
        Box::new(move || {
            for signal in signals.forever() {
                let event = if signal == SIGWINCH { Event::Resized } else { Event::Quit };
                if heard.send(event).is_err() {
                    return;
                }
            }
        }),
    )
}

impl View {
    fn take(&mut self, sample: Sample) {
        let mut longest = BTreeMap::new();
        for held in &sample.held {
            let id = (held.key.clone(), held.lease.permit, held.lease.fence);
            let before = self.longest.get(&id).copied().unwrap_or_default();
            longest.insert(id, before.max(held.remaining()));
        }
        self.longest = longest;
        self.sample = Some(sample);
        self.failure = None;
    }

    fn scroll(&mut self, key: Key) {
        let count = self.sample.as_ref().map_or(0, |sample| sample.held.len());
        self.top = match key {
            Key::Down | Key::Char('j') => self.top + 1,
            Key::Up | Key::Char('k') => self.top.saturating_sub(1),
            Key::PageDown | Key::Char(' ') => self.top + 10,
            Key::PageUp => self.top.saturating_sub(10),
            Key::Home | Key::Char('g') => 0,
            Key::End | Key::Char('G') => count,
            _ => self.top,
        }
        .min(count.saturating_sub(1));
    }

    fn draw(&self, frame: &mut ratatui::Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(Paragraph::new(self.heading()), head);
        self.draw_table(frame, body);
        let foot_line = match &self.failure {
            Some(failure) => Line::styled(format!("no news: {failure}"), self.colour(Color::Red)),
            None => Line::raw("q quits, arrows scroll"),
        };
        frame.render_widget(Paragraph::new(foot_line), foot);
    }

    fn heading(&self) -> String {
        let Some(sample) = &self.sample else { return "syncguard".to_owned() };
        let waiting: u64 = sample.waiting.values().sum();
        let now = sample.held.first().map_or_else(String::new, |held| format!(", {}", clock(held.now_ms)));
        format!("syncguard: {} held, {waiting} waiting{now}", sample.held.len())
    }

    fn draw_table(&self, frame: &mut ratatui::Frame<'_>, area: Rect) {
        let Some(sample) = &self.sample else { return };
        let rows = sample.held.iter().skip(self.top).map(|held| self.row(held, sample));
        let mut widths = vec![
            Constraint::Fill(1),
            Constraint::Length(12),
            Constraint::Length(14),
            Constraint::Length(22),
            Constraint::Length(7),
        ];
        let mut headings = vec!["KEY", "FENCE", "HELD FOR", "TTL LEFT", "WAITERS"];
        if sample.held.iter().any(|held| held.lease.who().is_some()) {
            widths.push(Constraint::Fill(1));
            headings.push("WHO");
        }
        let headings = Row::new(headings).style(Style::new().add_modifier(Modifier::BOLD));
        frame.render_widget(Table::new(rows, widths).header(headings), area);
    }

    fn row(&self, held: &Held, sample: &Sample) -> Row<'static> {
        let waiting = sample.waiting.get(&hash_key(&held.key)).copied().unwrap_or(0);
        let cells = [
            Line::raw(held.name()),
            Line::raw(held.lease.fence.get().to_string()),
            Line::raw(age(held.age())),
            self.bar(held),
            Line::raw(if waiting == 0 { String::new() } else { waiting.to_string() }),
            Line::raw(held.lease.who().unwrap_or_default()),
        ];
        Row::new(cells)
    }

    /// What is left of the lease, of the most that was seen of it.
    fn bar(&self, held: &Held) -> Line<'static> {
        let id = (held.key.clone(), held.lease.permit, held.lease.fence);
        let (rest, whole) = (held.remaining(), self.longest.get(&id).copied().unwrap_or_default());
        let full = filled(rest, whole);
        let colour = match full {
            0..=2 => Color::Red,
            3..=5 => Color::Yellow,
            _ => Color::Green,
        };
        Line::from(vec![
            Span::styled("█".repeat(full), self.colour(colour)),
            Span::raw("░".repeat(BAR - full)),
            Span::raw(format!(" {}", age(rest))),
        ])
    }

    fn colour(&self, colour: Color) -> Style {
        if self.coloured { Style::new().fg(colour) } else { Style::new() }
    }
}

/// How many cells of the bar are full.
fn filled(rest: Duration, whole: Duration) -> usize {
    let cells = rest.as_millis() * BAR as u128 / whole.as_millis().max(1);
    usize::try_from(cells).unwrap_or(BAR).min(BAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_full_after_a_renewal_and_empty_at_the_end() {
        let s = Duration::from_secs;
        assert_eq!([filled(s(30), s(30)), filled(s(15), s(30)), filled(s(0), s(30))], [10, 5, 0]);
        assert_eq!([filled(s(31), s(30)), filled(s(0), s(0))], [10, 0]);
    }
}
