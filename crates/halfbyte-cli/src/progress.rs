//! Progress on a terminal, for what can pass two seconds.

use crate::app::App;
use crate::text::escaped;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on standard error with what is done, the rate and the time left; nothing where that is no terminal.
#[derive(Debug)]
pub struct Progress(ProgressBar);

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
        Self::styled(app, what, &format!("{{msg}} {{wide_bar}} {counted}, {{eta}} left"))
    }

    /// A line that says what is being done, for work without a known length.
    pub fn steps(app: &App) -> Self {
        Self::styled(app, "", "{spinner} {msg}")
    }

    fn styled(app: &App, what: &'static str, template: &str) -> Self {
        let target = if app.quiet() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(5) };
        let bar = ProgressBar::with_draw_target(Some(0), target).with_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Shows how far it is.
    pub fn at(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Shows what is being done now.
    pub fn step(&self, what: impl AsRef<str>) {
        self.0.set_message(escaped(what.as_ref()).into_owned());
        self.0.tick();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
