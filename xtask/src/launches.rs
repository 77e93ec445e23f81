//! `cargo xtask launches`: whether devices that nobody here has would take what is launched on them.
//!
//! Products, convolutions, layers of experts and models of random shapes and formats are measured by the command line on a driver
//! that runs no kernel and refuses what a device would refuse (`launches/null_driver.c`). Kernels are compiled for each device, so
//! NVRTC is needed. Times and results mean nothing; that nothing is refused and nothing panics does. Each command runs twice more: on
//! a device that is lost in the middle, and without memory for one request; it must end with an error, or do without.

mod cases;

use cases::{Case, Random, SmallModels};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Commands to draw.
    #[arg(long, default_value_t = 200)]
    count: usize,
    /// Others than with another number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The command line to run; built if none is named.
    #[arg(long)]
    program: Option<PathBuf>,
}

/// The longest that a command may take.
const LIMIT: Duration = Duration::from_secs(300);

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let program = match &args.program {
        Some(program) => std::path::absolute(program).map_err(|e| format!("{}: {e}", program.display()))?,
        None => crate::oracles::build(root)?,
    };
    let folder = root.join("target/launches");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let source = root.join("xtask/src/launches/null_driver.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
    crate::oracles::output_of(cc.arg(source).arg("-o").arg(folder.join("libcuda.so")))?;

    let mut random = Random(args.seed);
    let small_models = SmallModels::new(root)?;
    let cases: Vec<Case> = (0..args.count).map(|_| Case::draw(&mut random, &small_models)).collect();
    let (next, failed, launches) = (AtomicUsize::new(0), Mutex::new(Vec::new()), AtomicUsize::new(0));
    let work = || {
        while let Some((i, case)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, cases.get(i)?))) {
            match (Run { root, folder: &folder, program: &program, i, case }).all() {
                Ok(number) => drop(launches.fetch_add(number, Ordering::Relaxed)),
                Err(why) => failed.lock().unwrap_or_else(|e| e.into_inner()).push(why),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap_or_else(|e| e.into_inner());
    println!("{} launches of {} commands, {} of which failed", launches.into_inner(), cases.len(), failed.len());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n\n")) }
}

/// A case that is run.
struct Run<'a> {
    root: &'a Path,
    folder: &'a Path,
    program: &'a Path,
    i: usize,
    case: &'a Case,
}

/// How a command ended, and what it said on standard error.
struct Ended {
    status: ExitStatus,
    said: String,
    /// Launches, calls and requests for memory of each of its processes; none if the driver said anything else: a refusal.
    counts: Option<Vec<[usize; 3]>>,
}

impl Run<'_> {
    /// As it is, then on a device that is lost in the middle, then without memory for one request. The number of launches.
    fn all(&self) -> Result<usize, String> {
        let ended = self.once(None)?;
        let counts = ended.counts.as_ref().filter(|all| ended.status.success() && !all.is_empty());
        let counts = counts.ok_or_else(|| self.failure(None, &ended))?;
        let most = |of: usize| counts.iter().map(|counts| counts[of]).max().unwrap_or(0);
        let mut random = Random(self.i as u64);
        for (fault, of, must_fail) in [("lost", most(1) / 2, true), ("memory", most(2), false)] {
            let fault = format!("{fault} {}", 1 + random.below(of.max(1)));
            let ended = self.once(Some(&fault))?;
            // 101 is the status of a panic; none, that of a signal.
            let is_told =
                ended.status.code().is_some_and(|code| code != 0 && code < 100) && ended.said.contains("error: ");
            if ended.counts.is_none() || !is_told && (must_fail || !ended.status.success()) {
                return Err(self.failure(Some(&fault), &ended));
            }
        }
        Ok(counts.iter().map(|counts| counts[0]).sum())
    }

    fn once(&self, fault: Option<&str>) -> Result<Ended, String> {
        let Self { root, folder, program, i, case } = self;
        let log = folder.join(format!("{i}.log"));
        let file = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let older = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command.args(&case.arguments).current_dir(root).stdout(Stdio::null()).stderr(file);
        command.env("LD_LIBRARY_PATH", format!("{}:{older}", folder.display()));
        command.env("HALFBYTE_CACHE", folder.join("cache")).env("NULL_DRIVER", case.device.to_string());
        command.envs(fault.map(|fault| ("NULL_DRIVER_FAULT", fault)));
        let status = ended(&mut command).map_err(|why| format!("{case}\n{why}"))?;
        let said = std::fs::read_to_string(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let counts = said.lines().filter_map(|line| line.strip_prefix("null driver: ")).map(counts).collect();
        Ok(Ended { status, said, counts })
    }

    fn failure(&self, fault: Option<&str>, ended: &Ended) -> String {
        let lines: Vec<&str> = ended.said.lines().filter(|line| !line.starts_with("compiling")).collect();
        let fault = fault.map_or_else(String::new, |fault| format!("NULL_DRIVER_FAULT=\"{fault}\" "));
        format!("{fault}{}\n{}\n{}", self.case, ended.status, lines[lines.len().saturating_sub(12)..].join("\n"))
    }
}

/// What the driver says at the end of a process.
fn counts(line: &str) -> Option<[usize; 3]> {
    let mut parts = line.split(", ").zip([" launches", " calls", " requests for memory"]);
    let mut next = || parts.next().and_then(|(part, of)| part.strip_suffix(of)?.parse().ok());
    Some([next()?, next()?, next()?])
}

/// How a command ends. Error: it cannot be started, or takes too long.
fn ended(command: &mut Command) -> Result<ExitStatus, String> {
    let mut child = command.spawn().map_err(|e| format!("{command:?}: {e}"))?;
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            return Ok(status);
        }
        if begin.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no end after {} s", LIMIT.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
