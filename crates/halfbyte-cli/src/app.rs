//! What every command works with: the device, and where to print.

use crate::args::{Common, Device};
use crate::failure::{Exit, Failure, Result};
use crate::text;
use halfbyte::cpu::Cpu;
use serde::Serialize;

/// Version of the JSON objects' form.
const SCHEMA: u32 = 1;

/// The common options, taken at their word.
#[derive(Debug)]
pub struct App {
    common: Common,
}

impl App {
    /// Error: a team of threads that cannot be made.
    pub fn new(common: Common) -> Result<Self> {
        let app = Self { common };
        // Quantising and converting run on a pool of their own.
        rayon::ThreadPoolBuilder::new()
            .num_threads(app.threads())
            .build_global()
            .map_err(|e| Failure::device(format!("cannot start {} threads", app.threads()), e.to_string()))?;
        Ok(app)
    }

    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, usize::from);
        self.common.threads.map_or_else(all, usize::from)
    }

    /// The number of the GPU that was asked for.
    pub fn cuda(&self) -> Option<u32> {
        match self.common.device {
            Device::Cuda(number) => Some(number),
            Device::Auto | Device::Cpu => None,
        }
    }

    /// The CPU as a device. Error: another one was asked for, of a command that has the CPU only.
    pub fn cpu(&self) -> Result<Cpu> {
        if let Some(number) = self.cuda() {
            return Err(Failure::new(
                Exit::Device,
                format!("device cuda:{number} is not available"),
                "GPUs are not supported by this command in this version",
                "use --device cpu, or leave --device out",
            ));
        }
        Ok(Cpu::new(self.threads())?)
    }

    /// Whether the result is printed as JSON.
    pub fn json(&self) -> bool {
        self.common.json
    }

    /// Whether nothing but results and errors is printed.
    pub fn quiet(&self) -> bool {
        self.common.quiet
    }

    /// Prints a line to standard error, unless told to be quiet.
    pub fn note(&self, line: &str) {
        if !self.common.quiet {
            text::write_error(&format!("{line}\n"));
        }
    }

    /// Prints a command's result.
    pub fn result<T: Serialize>(&self, result: &T, human: impl FnOnce(&T) -> String) -> Result<()> {
        if !self.common.json {
            return text::write_output(&human(result));
        }
        #[derive(Serialize)]
        struct Envelope<'a, T> {
            schema: u32,
            #[serde(flatten)]
            result: &'a T,
        }
        let json = serde_json::to_string(&Envelope { schema: SCHEMA, result }).map_err(|e| {
            Failure::new(Exit::Input, "the result cannot be written as JSON", e.to_string(), "leave --json out")
        })?;
        text::write_output(&format!("{json}\n"))
    }
}
