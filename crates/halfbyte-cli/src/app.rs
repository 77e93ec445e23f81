//! What every command works with: the device, and where to print.

use crate::args::{Common, Device};
use crate::failure::{Exit, Failure, Result};
use crate::ranks::{Given, Local, Ranks};
use crate::{escape, text};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::{Gpu as CudaGpu, nn};
use halfbyte_checkpoint::Finding;
use halfbyte_llm::device::Gpu;
use serde::Serialize;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Version of the JSON objects' form.
pub const SCHEMA: u32 = 1;

/// Threads that the system offers.
fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The common options, taken at their word.
#[derive(Debug)]
pub struct App {
    common: Common,
    /// The GPU, once it is asked for; none if the CPU computes.
    gpu: OnceLock<Option<Gpu>>,
    ranks: Ranks,
    begun: Instant,
}

impl App {
    /// The options of a command, which as a whole was given so. Error: a team of threads that cannot be made.
    pub fn new(common: Common, given: Given) -> Result<Self> {
        let app = Self { common, gpu: OnceLock::new(), ranks: Ranks::of(given), begun: Instant::now() };
        let all = available_threads();
        if app.threads() > all {
            app.note(&format!("note: --threads {} is more than the {all} of this machine, and slower", app.threads()));
        }
        // Quantising and converting run on a pool of their own.
        rayon::ThreadPoolBuilder::new().num_threads(app.threads()).build_global().map_err(|e| {
            Failure::device(format!("cannot start {}", text::several(app.threads(), "thread")), e.to_string())
        })?;
        Ok(app)
    }

    /// Time since the program began, but for the reading of its arguments.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.common.threads.map_or_else(available_threads, usize::from)
    }

    /// The device as it was named.
    pub fn device(&self) -> &Device {
        &self.common.device
    }

    /// The number of the GPU that was asked for, for what one process does. Error: several were.
    pub fn cuda(&self) -> Result<Option<u32>> {
        match &self.common.device {
            Device::Cuda(numbers) => Local::of(1)?.gpu(numbers).map(Some),
            Device::Auto | Device::Cpu => Ok(None),
        }
    }

    /// The numbers of all GPUs that were asked for, one for each rank: those named, else all of the machine. Error: none was.
    pub fn all_cuda(&self) -> Result<Vec<u32>> {
        match &self.common.device {
            Device::Cuda(numbers) if !numbers.is_empty() => Ok(numbers.clone()),
            Device::Cuda(_) if CudaGpu::count() > 0 => Ok((0..CudaGpu::count() as u32).collect()),
            _ => {
                let why = "what is timed are kernels of GPUs";
                Err(Failure::new(Exit::Usage, "GPUs are needed", why, "use --device cuda, or cuda:I,J,..."))
            }
        }
    }

    /// The CPU, which some of the work is done by on any device. Error: a team of threads that cannot be made.
    pub fn cpu(&self) -> Result<Cpu> {
        Ok(Cpu::new(self.threads())?)
    }

    /// Refuses a GPU for a command that computes on the CPU only.
    pub fn cpu_only(&self) -> Result<()> {
        let Some(number) = self.cuda()? else { return Ok(()) };
        Err(Failure::new(
            Exit::Device,
            format!("device cuda:{number} is not available for this command"),
            "GPUs are not supported here: run, serve, eval, demo, and bench model, models, experts, matmul, conv, launch and ranks compute on them",
            "use --device cpu, or leave --device out",
        ))
    }

    /// The GPU that models compute on, if they do, shared among so many ranks: the one asked for, else the first that works; of ranks each
    /// has its own. Errors: the one asked for is not to be had, another number of GPUs than of ranks on this machine.
    pub fn gpu(&self, ranks: usize) -> Result<Option<Gpu>> {
        if let Some(known) = self.gpu.get() {
            return Ok(known.clone());
        }
        let gpu = match &self.common.device {
            Device::Cpu => None,
            Device::Cuda(numbers) => Some(Gpu::open(Local::of(ranks)?.gpu(numbers)?)?),
            Device::Auto if ranks < 2 => self.first_that_works(),
            Device::Auto if CudaGpu::count() == 0 => None,
            Device::Auto => Some(Gpu::open(Local::of(ranks)?.gpu(&[])?)?),
        };
        Ok(self.gpu.get_or_init(|| gpu).clone())
    }

    /// Those that share a model.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Whether the device was left to this program.
    pub fn chooses_device(&self) -> bool {
        self.common.device == Device::Auto
    }

    /// The first GPU that takes a kernel; why one does not is noted.
    fn first_that_works(&self) -> Option<Gpu> {
        (0..CudaGpu::count() as u32).find_map(|index| {
            let works = |gpu: Gpu| {
                gpu.gpu.prepare(&nn::instances(gpu.gpu.caps().arch, None, &[])[..1], |_| ())?;
                Ok::<Gpu, halfbyte::Error>(gpu)
            };
            let gpu = Gpu::open(index).and_then(works);
            gpu.inspect_err(|why| self.note(&format!("note: cuda:{index} is not used: {why}"))).ok()
        })
    }

    /// Whether the result is printed as JSON.
    pub fn json(&self) -> bool {
        self.common.json
    }

    /// Whether nothing but results and errors is printed.
    pub fn quiet(&self) -> bool {
        self.common.quiet
    }

    /// Prints a line to standard error, escaped, unless told to be quiet.
    pub fn note(&self, line: &str) {
        if !self.common.quiet {
            text::write_error(&format!("{}\n", escape::escaped(line)));
        }
    }

    /// Notes what is odd about a model.
    pub fn findings(&self, findings: &[Finding]) {
        findings.iter().for_each(|finding| self.note(&format!("note: {finding}")));
    }

    /// Prints a command's result. What `human` takes from files into a line of its own it escapes itself; tables do.
    pub fn result<T: Serialize>(&self, result: &T, human: impl FnOnce(&T) -> String) -> Result<()> {
        if !self.common.json {
            return text::write_output(&escape::escaped_lines(&human(result)));
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
        text::write_output(&format!("{}\n", escape::safe_json(&json)))
    }
}
