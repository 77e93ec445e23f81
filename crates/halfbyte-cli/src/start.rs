//! Where the time goes until a model's first token.

use crate::app::App;
use crate::text::bytes;
use halfbyte_llm::device::LoadTimes;
use serde::Serialize;
use std::time::Instant;

/// Seconds of the parts of a start, one after the other: what is done beside another part counts only as far as it was waited for.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Start {
    /// The program itself, headers of files and the configuration.
    pub files: f64,
    /// The driver and the context of a GPU, which are opened meanwhile.
    pub device: f64,
    /// Reading weights, sending them to a GPU, packing them.
    pub weights: f64,
    /// Of these, on a GPU.
    pub sending: Option<Sending>,
    /// Loading kernels, which begins with the weights.
    pub kernels: f64,
    /// The tokenizer, which is read while all of this is done.
    pub tokenizer: f64,
    /// Room for a text, the prompt, and the token after it.
    pub first_token: f64,
}

/// How weights came to a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Sending {
    /// Bytes that went over the bus.
    pub bytes: u64,
    /// Threads that read, each for some layers.
    pub lanes: usize,
    /// Of the time of these threads: copying to pinned memory.
    pub copying: f64,
    /// Of the time of these threads: waiting for the GPU, which copies and packs.
    pub waiting: f64,
    /// Seconds of the thread that loaded kernels meanwhile.
    pub kernels_meanwhile: f64,
}

impl Sending {
    fn of(times: LoadTimes) -> Self {
        let LoadTimes { weights, lanes, sent, kernels } = times;
        let share = |part: f64| part / (lanes as f64 * weights.as_secs_f64()).max(1e-9);
        Self {
            bytes: sent.bytes,
            lanes,
            copying: share(sent.writing.as_secs_f64()),
            waiting: share(sent.waiting.as_secs_f64()),
            kernels_meanwhile: kernels.as_secs_f64(),
        }
    }
}

impl Start {
    /// Notes how weights came to a GPU, if they did.
    pub fn sent(&mut self, times: Option<LoadTimes>) {
        self.sending = times.map(Sending::of);
    }

    /// All parts.
    pub fn total(&self) -> f64 {
        let Self { device, files, weights, sending: _, kernels, tokenizer, first_token } = self;
        device + files + weights + kernels + tokenizer + first_token
    }

    /// A line for people.
    pub fn line(&self) -> String {
        let Self { device, files, weights, sending, kernels, tokenizer, first_token } = self;
        let sending = sending.as_ref().map_or_else(String::new, |s| {
            let rate = s.bytes as f64 / weights.max(1e-9);
            format!(
                " ({} at {}/s; {} lanes copied {:.0} % of the time and waited for the GPU {:.0} %)",
                bytes(s.bytes),
                bytes(rate as u64),
                s.lanes,
                100.0 * s.copying,
                100.0 * s.waiting
            )
        });
        format!(
            "start {:.2} s: files {files:.2}, device {device:.2}, weights {weights:.2}{sending}, kernels {kernels:.2}, \
             tokenizer {tokenizer:.2}, first token {first_token:.2}",
            self.total()
        )
    }
}

/// What tells the parts of a start apart.
#[derive(Debug)]
pub struct Laps(Instant);

impl Laps {
    /// From the start of the program on.
    pub fn since_start(app: &App) -> Self {
        let now = Instant::now();
        Self(now.checked_sub(app.age()).unwrap_or(now))
    }

    /// Seconds since this was asked before.
    pub fn lap(&mut self) -> f64 {
        let now = Instant::now();
        (now - std::mem::replace(&mut self.0, now)).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::cuda::driver::Sent;
    use std::time::Duration;

    #[test]
    fn parts_add_up_and_are_told() {
        let mut start = Start { files: 0.02, device: 0.4, weights: 0.5, first_token: 0.08, ..Start::default() };
        assert_eq!(
            start.line(),
            "start 1.00 s: files 0.02, device 0.40, weights 0.50, kernels 0.00, tokenizer 0.00, first token 0.08"
        );
        let half = Duration::from_millis(500);
        let sent = Sent { bytes: 5_000_000_000, writing: 3 * half, waiting: half };
        start.sent(Some(LoadTimes { weights: half, lanes: 4, sent, kernels: half }));
        let line = start.line();
        let told = "weights 0.50 (5.00 GB at 10.00 GB/s; 4 lanes copied 75 % of the time and waited for the GPU 25 %), kernels";
        assert!(line.contains(told), "{line}");
        assert!((start.total() - 1.0).abs() < 1e-12);
    }
}
