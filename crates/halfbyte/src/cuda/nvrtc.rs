//! NVRTC, the run-time compiler: sources in memory to machine code (cubin) for one processor.
//!
//! Where it is looked for: [`super::library`], `HALFBYTE_NVRTC`. It is opened by its path rather than through a crate,
//! because the path may come from an environment variable or a Python package. Sources include no header of the toolkit,
//! so that the library alone is enough, as `pip install nvidia-cuda-nvrtc` brings it. Output is machine code and not PTX, unless
//! a virtual processor is asked for: a driver refuses the PTX of a newer NVRTC, but takes the machine code of one of its own major
//! version.

use super::driver::Version;
use super::library::{self, NVRTC, Opened};
use super::sources::{ARCH_VARIABLE, Arch, HEADERS, Instance};
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

type Program = *mut c_void;
type Code = c_int;

/// What the compiler is told for every kernel. No fast-math: results are bounded element by element.
pub const FLAGS: &[&str] = &["--std=c++17"];

/// The library's functions, as its header declares them; codes of errors are plain numbers here, since a newer library
/// may know more of them.
struct Functions {
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
    add_name: unsafe extern "C" fn(Program, *const c_char) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    lowered_name: unsafe extern "C" fn(Program, *const c_char, *mut *const c_char) -> Code,
}

/// The compiler, opened.
pub struct Nvrtc {
    version: Version,
    archs: Vec<u32>,
    functions: Functions,
    library: Opened,
    /// What it opens by name while it compiles, opened here from its own folder.
    _builtins: Option<Opened>,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVRTC {} of {}", self.version, self.library.path().display())
    }
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Name of the function in the code.
    pub name: String,
    /// Machine code (cubin); of a virtual processor PTX, which ends with a zero.
    pub code: Vec<u8>,
}

static OPENED: OnceLock<Nvrtc> = OnceLock::new();

impl Nvrtc {
    /// Opens the compiler, once a process; not one of a newer major version than the driver, if there is a driver.
    ///
    /// Error: it is in none of the places, or is not whole.
    pub fn open() -> Result<&'static Self> {
        if let Some(nvrtc) = OPENED.get() {
            return Ok(nvrtc);
        }
        let newest = super::driver::Driver::open().ok().map(|driver| driver.version().major);
        let nvrtc = Self::from_library(library::open(&NVRTC, newest)?)?;
        Ok(OPENED.get_or_init(|| nvrtc))
    }

    fn from_library(library: Opened) -> Result<Self> {
        // SAFETY: the types are those of nvrtc.h, and the library is kept beside the functions.
        let (functions, version, arch_count, arch_list) = unsafe {
            let functions = Functions {
                error_string: library.function("nvrtcGetErrorString")?,
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                add_name: library.function("nvrtcAddNameExpression")?,
                compile: library.function("nvrtcCompileProgram")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                ptx_size: library.function("nvrtcGetPTXSize")?,
                ptx: library.function("nvrtcGetPTX")?,
                lowered_name: library.function("nvrtcGetLoweredName")?,
            };
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code = library.function("nvrtcVersion")?;
            let count: unsafe extern "C" fn(*mut c_int) -> Code = library.function("nvrtcGetNumSupportedArchs")?;
            let list: unsafe extern "C" fn(*mut c_int) -> Code = library.function("nvrtcGetSupportedArchs")?;
            (functions, version, count, list)
        };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: each takes room for one number.
        functions.check("NVRTC", unsafe { version(&mut major, &mut minor) })?;
        // SAFETY: as above.
        functions.check("NVRTC", unsafe { arch_count(&mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: room for as many numbers as the library has just said.
        functions.check("NVRTC", unsafe { arch_list(archs.as_mut_ptr()) })?;
        let archs = archs.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect();
        let builtins = format!("libnvrtc-builtins.so.{major}.{minor}");
        let beside = library.path().parent().map(|folder| folder.join(builtins)).filter(|file| file.exists());
        let _builtins = beside.and_then(|file| library::open_file(&file).ok());
        let version = Version { major: u32::try_from(major).unwrap_or(0), minor: u32::try_from(minor).unwrap_or(0) };
        Ok(Self { version, archs, functions, library, _builtins })
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Whether it makes code for a processor.
    pub fn knows(&self, arch: Arch) -> bool {
        self.archs.contains(&arch.number)
    }

    /// Compiles one instance of a kernel.
    ///
    /// Errors: a processor that this version does not know, sources that cannot be read, [`Error::Compile`] with what the
    /// compiler says.
    pub fn compile(&self, instance: &Instance, arch: Arch) -> Result<Compiled> {
        self.compile_with(instance, arch, &[]).map(|(compiled, _)| compiled)
    }

    /// Compiles one instance with more options, and gives what the compiler says too.
    pub fn compile_with(&self, instance: &Instance, arch: Arch, options: &[&str]) -> Result<(Compiled, String)> {
        let fail = |log: String| Error::Compile { kernel: instance.to_string(), arch: arch.to_string(), log };
        if !self.knows(arch) {
            let known: Vec<String> = self.archs.iter().map(|arch| format!("sm_{arch}")).collect();
            // Code of an older processor runs on a newer one too, as PTX.
            let newest = self.archs.iter().filter(|&&known| known < arch.number).max();
            let older = newest.map_or(String::new(), |newest| {
                format!("; {ARCH_VARIABLE}=compute_{newest} runs code of an older one")
            });
            return Err(fail(format!("NVRTC {} knows only {}{older}", self.version, known.join(", "))));
        }
        let c_string = |text: &str| CString::new(text).map_err(|_| fail("a zero byte in a source or an option".into()));
        let text = c_string(&instance.source.checked()?)?;
        let name = c_string(instance.source.path)?;
        let expression = c_string(&instance.expression)?;
        let headers = HEADERS.iter().map(|header| c_string(&header.read()?)).collect::<Result<Vec<_>>>()?;
        let header_names = HEADERS.iter().map(|header| c_string(header.name())).collect::<Result<Vec<_>>>()?;
        let arch_option = format!("--gpu-architecture={arch}");
        let defines: Vec<String> = instance.defines.iter().map(|define| format!("--define-macro={define}")).collect();
        let given = options.iter().copied().chain(defines.iter().map(String::as_str));
        let options = [arch_option.as_str()].into_iter().chain(FLAGS.iter().copied()).chain(given);
        let options = options.map(c_string).collect::<Result<Vec<_>>>()?;
        let pointers = |texts: &[CString]| -> Vec<*const c_char> { texts.iter().map(|text| text.as_ptr()).collect() };
        let (headers_at, names_at, options_at) = (pointers(&headers), pointers(&header_names), pointers(&options));
        let f = &self.functions;
        let mut program = Open { functions: f, handle: std::ptr::null_mut() };
        // SAFETY: all texts end with zeros, the arrays have the lengths given, and the library copies them.
        f.check("NVRTC", unsafe {
            (f.create)(
                &mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                headers_at.len() as c_int,
                headers_at.as_ptr(),
                names_at.as_ptr(),
            )
        })?;
        // SAFETY: the program is open, the text ends with a zero.
        f.check("NVRTC", unsafe { (f.add_name)(program.handle, expression.as_ptr()) })?;
        // SAFETY: as above, as many options as said.
        let code = unsafe { (f.compile)(program.handle, options_at.len() as c_int, options_at.as_ptr()) };
        let log = program.text(f.log_size, f.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        if code != 0 {
            return Err(fail(if log.is_empty() { f.describe(code) } else { log }));
        }
        let mut lowered = std::ptr::null();
        // SAFETY: the program is compiled, the expression was added to it.
        f.check("NVRTC", unsafe { (f.lowered_name)(program.handle, expression.as_ptr(), &mut lowered) })?;
        // SAFETY: the library's text ends with a zero and lives as long as the program.
        let name = unsafe { CStr::from_ptr(lowered) }.to_string_lossy().into_owned();
        let code = match arch.ptx {
            true => program.text(f.ptx_size, f.ptx)?,
            false => program.text(f.cubin_size, f.cubin)?,
        };
        Ok((Compiled { name, code }, log))
    }
}

/// A program, destroyed when dropped.
struct Open<'a> {
    functions: &'a Functions,
    handle: Program,
}

impl Open<'_> {
    /// What two functions give, the first of which says how long it is.
    fn text(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is open; room for one number.
        self.functions.check("NVRTC", unsafe { size(self.handle, &mut bytes) })?;
        let mut text = vec![0u8; bytes];
        // SAFETY: as many bytes as the library has just said.
        self.functions.check("NVRTC", unsafe { read(self.handle, text.as_mut_ptr().cast()) })?;
        Ok(text)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once, destroyed here once.
            let _ = unsafe { (self.functions.destroy)(&mut self.handle) };
        }
    }
}

impl Functions {
    fn check(&self, op: &'static str, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(Error::Device { op, cause: self.describe(code) }) }
    }

    fn describe(&self, code: Code) -> String {
        // SAFETY: takes every number; the text is the library's own and stays.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
