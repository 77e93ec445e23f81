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
    /// Error: a device that this version does not have, a team of threads that cannot be made.
    pub fn new(common: Common) -> Result<Self> {
        if let Device::Cuda(number) = common.device {
            return Err(Failure::new(
                Exit::Device,
                format!("device cuda:{number} is not available"),
                "GPUs are not supported in this version",
                "use --device cpu, or leave --device out",
            ));
        }
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

    /// The CPU as a device.
    pub fn cpu(&self) -> Result<Cpu> {
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
