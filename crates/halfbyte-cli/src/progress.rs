//! Progress on standard error, for what can pass two seconds: a bar on a terminal, elsewhere a line every ten seconds.

use crate::app::App;
use crate::escape::escaped;
use crate::text::{bytes, write_error};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

/// What is done, the rate and the time left.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// Where standard error is no terminal.
    lines: Option<Lines>,
}

/// What a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Whatever the word says.
    Things(&'static str),
}

impl Progress {
    /// A bar; its length may be set later by [`Progress::at`].
    pub fn new(app: &App, what: &'static str, unit: Unit) -> Self {
        let counted = match unit {
            Unit::Bytes => "{bytes}/{total_bytes}, {bytes_per_sec}".to_owned(),
            Unit::Things(name) => format!("{{pos}}/{{len}} {name}, {{per_sec}}"),
        };
        Self::styled(app, what, unit, &format!("{{msg}} {{wide_bar}} {counted}, {{eta}} left"))
    }

    /// A line that says what is being done, for work without a known length.
    pub fn steps(app: &App) -> Self {
        Self::styled(app, "", Unit::Things("steps"), "{spinner} {msg}")
    }

    fn styled(app: &App, what: &'static str, unit: Unit, template: &str) -> Self {
        let target = if app.quiet() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(5) };
        let bar = ProgressBar::with_draw_target(Some(0), target).with_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let lines = !app.quiet() && !stderr().is_terminal();
        let lines = lines.then(|| Lines::every(EVERY, State::new(what, unit), |line| write_error(&line)));
        Self { bar, lines }
    }

    /// Shows how far it is.
    pub fn at(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if let Some(lines) = &self.lines {
            lines.set(|state| (state.done, state.total) = (done, total));
        }
    }

    /// Shows what is being done now.
    pub fn step(&self, what: impl AsRef<str>) {
        let what = escaped(what.as_ref()).into_owned();
        if let Some(lines) = &self.lines {
            lines.set(|state| state.what.clone_from(&what));
        }
        self.bar.set_message(what);
        self.bar.tick();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How far work is.
#[derive(Clone, Debug)]
struct State {
    what: String,
    unit: Unit,
    done: u64,
    /// 0: unknown.
    total: u64,
    begun: Instant,
}

impl State {
    fn new(what: &str, unit: Unit) -> Self {
        Self { what: what.to_owned(), unit, done: 0, total: 0, begun: Instant::now() }
    }

    fn line(&self, passed: Duration) -> String {
        let Self { what, unit, done, total, .. } = self;
        let seconds = passed.as_secs_f64();
        if *total == 0 || *done == 0 {
            return format!("{what}, {seconds:.0} s so far\n");
        }
        let rate = *done as f64 / seconds.max(1e-9);
        let left = total.saturating_sub(*done) as f64 / rate;
        let counted = match unit {
            Unit::Bytes => format!("{} of {}, {}/s", bytes(*done), bytes(*total), bytes(rate as u64)),
            Unit::Things(name) => format!("{done} of {total} {name}, {rate:.2}/s"),
        };
        format!("{what}: {counted}, {left:.0} s left\n")
    }
}

/// A thread that says how far work is, from time to time.
#[derive(Debug)]
struct Lines {
    state: Arc<Mutex<State>>,
    /// The thread ends when this goes.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lines {
    fn every(interval: Duration, state: State, write: impl Fn(String) + Send + 'static) -> Self {
        let state = Arc::new(Mutex::new(state));
        let (alive, dead) = channel();
        let shown = state.clone();
        let tell = move || {
            while dead.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let state = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
                write(state.line(state.begun.elapsed()));
            }
        };
        // Without a thread to spare nothing is told.
        let thread = std::thread::Builder::new().spawn(tell).ok();
        Self { state, alive: Some(alive), thread }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.alive.take();
        if let Some(thread) = self.thread.take() {
            // It only prints.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_what_is_done_the_rate_and_the_time_left() {
        let mut state = State::new("converting", Unit::Bytes);
        assert_eq!(state.line(Duration::from_secs(20)), "converting, 20 s so far\n");
        (state.done, state.total) = (3_000_000, 9_000_000);
        assert_eq!(state.line(Duration::from_secs(10)), "converting: 3.0 MB of 9.0 MB, 300.0 kB/s, 20 s left\n");
        state.unit = Unit::Things("blocks");
        (state.done, state.total) = (5, 20);
        assert_eq!(state.line(Duration::from_secs(10)), "converting: 5 of 20 blocks, 0.50/s, 30 s left\n");
    }

    #[test]
    fn lines_come_from_time_to_time_and_end_with_the_work() {
        let (write, written) = channel();
        let lines = Lines::every(Duration::from_millis(5), State::new("", Unit::Bytes), move |line| {
            // Nobody may listen any more.
            let _ = write.send(line);
        });
        lines.set(|state| state.what = "packing".to_owned());
        let until = Instant::now() + Duration::from_secs(20);
        while !written.recv_timeout(until - Instant::now()).unwrap().starts_with("packing, 0 s so far") {}
        drop(lines);
        while written.try_recv().is_ok() {}
        assert!(written.recv_timeout(Duration::from_millis(50)).is_err());
    }
}
