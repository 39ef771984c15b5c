//! The live screen: lines of [`table`](super::table), until q, Esc, ctrl-C or a signal.
//!
//! A thread asks the server, so that keys are heard while an answer takes its time. The terminal is as it was afterwards,
//! however this ends. Titles are bold and bars reversed; nothing is said by a colour.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::Duration;

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::rates::Look;
use super::{failure, table};
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::live::client::{Client, Unanswered};
use crate::live::state::State;

/// How soon a signal, or an answer, is noticed.
const LOOK_AROUND: Duration = Duration::from_millis(50);

/// Puts the terminal back.
struct Terminal(ratatui::DefaultTerminal);

impl Terminal {
    fn take() -> io::Result<Terminal> {
        // Half of it may have been done.
        ratatui::try_init().map(Terminal).inspect_err(|_| drop(ratatui::try_restore()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Where the terminal has gone there is nothing to put back.
        let _ = ratatui::try_restore();
    }
}

/// The last two states.
struct Screen {
    earlier: State,
    state: State,
    interval: Duration,
    /// Lines above the first one that is shown.
    scroll: u16,
}

pub fn run(client: Client, first: State, interval: Duration) -> Result<()> {
    interrupt::catch();
    let failed = |e: io::Error| Failure::failed(format_args!("cannot use the terminal: {e}; try --once"));
    let screen = Screen { earlier: first.clone(), state: first, interval, scroll: 0 };
    let (asked, answers) = ask(client, interval).map_err(|e| {
        Failure::failed(format_args!("cannot start a thread (raise ulimit -u or pids.max): {e}; try --once"))
    })?;
    let mut terminal = Terminal::take().map_err(failed)?;
    let ended = watch(&mut terminal, screen, &answers);
    drop(terminal);
    drop(asked);
    match ended.map_err(failed)? {
        None => Ok(()),
        Some(why) => Err(why),
    }
}

/// States from now on, one each interval; the first failure is the last answer. Ends when the sender is dropped.
fn ask(client: Client, interval: Duration) -> io::Result<(Sender<()>, Receiver<Result<State>>)> {
    let (stop, stopped) = mpsc::channel::<()>();
    let (sender, answers) = mpsc::channel();
    thread::Builder::new().name("ask".to_owned()).spawn(move || {
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            let state = client.state().map_err(|why| gone(&client, &why));
            let is_last = state.is_err();
            if sender.send(state).is_err() || is_last {
                break;
            }
        }
    })?;
    Ok((stop, answers))
}

/// A server that did answer.
fn gone(client: &Client, why: &Unanswered) -> Failure {
    match why {
        Unanswered::Silent(e) => Failure::failed(format_args!(
            "{}: the mount server answers no more: {e}; it was unmounted, or has ended",
            client.address()
        )),
        Unanswered::Stranger(_) => failure(client, why),
    }
}

/// None when somebody has seen enough.
fn watch(
    terminal: &mut Terminal,
    mut screen: Screen,
    answers: &Receiver<Result<State>>,
) -> io::Result<Option<Failure>> {
    let mut changed = true;
    loop {
        if changed {
            terminal.0.draw(|frame| screen.draw(frame))?;
        }
        changed = event::poll(LOOK_AROUND)?;
        if changed && !screen.take(&event::read()?) || interrupt::requested() {
            return Ok(None);
        }
        match answers.try_recv() {
            Ok(Ok(state)) => {
                screen.earlier = std::mem::replace(&mut screen.state, state);
                changed = true;
            }
            Ok(Err(why)) => return Ok(Some(why)),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                return Ok(Some(Failure::failed("the mount server is not asked any more")));
            }
        }
    }
}

impl Screen {
    /// False where it is the end.
    fn take(&mut self, event: &Event) -> bool {
        let Event::Key(KeyEvent {
            code, modifiers, kind: KeyEventKind::Press | KeyEventKind::Repeat, ..
        }) = event
        else {
            return true;
        };
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::Down => self.scroll = self.scroll.saturating_add(1),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::Home => self.scroll = 0,
            _ => {}
        }
        true
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let bar = Style::new().add_modifier(Modifier::REVERSED);
        let head = Style::new().add_modifier(Modifier::BOLD);
        let [top, middle, bottom] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        let look = Look::new(&self.earlier, &self.state);
        let lines = table::lines(&look);
        let (title, rest) = lines.split_first().expect("there is always a title");
        let rest: Vec<Line<'_>> = rest
            .iter()
            .map(|line| match line {
                table::Line::Head(text) => Line::styled(text.as_str(), head),
                table::Line::Row(text) => Line::raw(text.as_str()),
            })
            .collect();
        let hidden = u16::try_from(rest.len()).unwrap_or(u16::MAX).saturating_sub(middle.height);
        self.scroll = self.scroll.min(hidden);
        let more = match hidden - self.scroll {
            0 => String::new(),
            below => format!("; {below} lines below"),
        };
        let keys = format!(" q ends, arrows scroll; every {} s{more}", self.interval.as_secs_f64());
        frame.render_widget(Paragraph::new(title.text()).style(bar), top);
        frame.render_widget(Paragraph::new(rest).scroll((self.scroll, 0)), middle);
        frame.render_widget(Paragraph::new(keys).style(bar), bottom);
    }
}

#[cfg(test)]
mod tests {
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::live::state::example;

    fn shown(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = ratatui::Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let cells = terminal.backend().buffer().content().chunks(width.into());
        cells.map(|row| row.iter().map(|cell| cell.symbol()).collect()).collect()
    }

    fn screen() -> Screen {
        Screen { earlier: example(), state: example(), interval: Duration::from_secs(1), scroll: 0 }
    }

    #[test]
    fn everything_fits_80_by_24() {
        let rows = shown(&mut screen(), 80, 24);
        let all = rows.join("\n");
        for part in [
            "/pools/demo.pool on /mnt",
            "space ",
            "depth by channel",
            "1 0 0 2",
            "owner",
            "metadata",
            "q ends",
        ] {
            assert!(all.contains(part), "no {part:?} in\n{all}");
        }
        assert!(!all.contains("lines below"), "{all}");
    }

    #[test]
    fn a_small_terminal_scrolls_and_a_tiny_one_is_no_error() {
        let mut screen = screen();
        assert!(shown(&mut screen, 80, 10).join("\n").contains("lines below"));
        let key = |code| Event::Key(KeyEvent::new(code, KeyModifiers::NONE));
        assert!((0..9).all(|_| screen.take(&key(KeyCode::PageDown))));
        let all = shown(&mut screen, 80, 10).join("\n");
        assert!(all.contains("watched") && !all.contains("lines below"), "{all}");
        assert!(screen.scroll < 50, "it stays where there is something to see");
        for (width, height) in [(1, 1), (2, 3), (500, 2)] {
            shown(&mut screen, width, height);
        }
    }

    #[test]
    fn keys_end_it() {
        let mut screen = screen();
        let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        assert!(!screen.take(&key(KeyCode::Char('q'), KeyModifiers::NONE)));
        assert!(!screen.take(&key(KeyCode::Esc, KeyModifiers::NONE)));
        assert!(!screen.take(&key(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(screen.take(&key(KeyCode::Char('c'), KeyModifiers::NONE)));
        assert!(screen.take(&Event::Resize(80, 24)));
    }
}
