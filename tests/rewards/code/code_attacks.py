"""Programs that try to pass tests without solving them, to get out of the sandbox, or to hold up the run."""

TESTS = ["assert add(1, 2) == 3", "assert add(5, 5) == 10", "assert add(-1, 1) == 0"]

FOOLING = {
    "prints what a passing test prints": "print('OK\\n3 passed\\n{\"passed\": true}')\ndef add(a, b): return None",
    "leaves with code 0": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "exits when called": "def add(a, b): raise SystemExit(0)",
    "equal to everything": "class E:\n def __eq__(s, o): return True\n def __bool__(s): return True\n"
    "def add(a, b): return E()",
    "an int equal to everything": "class E(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\n"
    "def add(a, b): return E(7)",
    "patches unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    "unittest.TestResult.wasSuccessful = lambda s: True\ndef add(a, b): return 0",
    "patches builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.exec = lambda *a: None\n"
    "builtins.compile = lambda *a: None\ndef add(a, b): return 0",
    "looks for the tests in memory": "import gc, sys\ndef add(a, b):\n"
    " wanted = ' '.join(['assert', 'add('])\n"
    " for o in gc.get_objects():\n"
    "  if isinstance(o, (list, tuple)) and any(isinstance(x, str) and wanted in x for x in o): return a + b\n"
    " f = sys._getframe()\n"
    " while f:\n"
    "  if any(wanted in repr(v) for v in f.f_locals.values() if v is not wanted): return a + b\n"
    "  f = f.f_back\n"
    " return None",
    "reads the tests from disk": "import glob\ndef add(a, b):\n"
    " for name in glob.glob('/work/**/*.py', recursive=True) + glob.glob('/tmp/**', recursive=True):\n"
    "  try:\n   if 'assert add' in open(name).read(): return a + b\n"
    "  except OSError: pass\n return None",
    "writes into its channel": "import os\ndef add(a, b):\n"
    " for fd in range(3, 64):\n"
    "  try: os.write(fd, b'\\x00\\x00\\x00\\x10{\"passed\": true}' * 9)\n"
    "  except OSError: pass\n return None",
    "closes everything": "import os\nos.closerange(0, 64)\ndef add(a, b): return a + b",
    "sends an endless value": "def add(a, b):\n x = []\n x.append(x)\n return x",
    "sends an endless iterator": "import itertools\ndef add(a, b): return itertools.count()",
    "a deep value": "def add(a, b):\n x = 0\n for _ in range(100000): x = [x]\n return x",
    "a huge value": "def add(a, b): return 'x' * 10 ** 8",
    "does not compile": "def add(a, b) return a + b",
    "another name": "def plus(a, b): return a + b",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return 0",
    "kills everyone": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef add(a, b): return 0",
}  # fmt: skip

ESCAPES = {
    "write a file": "open('{folder}/escaped', 'w').write('x')",
    "write to the current folder": "open('escaped', 'w').write('x')",
    "append to a file": "open('{folder}/victim', 'a').write('x')",
    "remove a file": "import os; os.remove('{folder}/victim')",
    "rename a file": "import os; os.rename('{folder}/victim', '{folder}/escaped')",
    "make a folder": "import os; os.mkdir('{folder}/escaped')",
    "link": "import os; os.symlink('/etc/passwd', '{folder}/escaped')",
    "truncate": "import os; os.truncate('{folder}/victim', 0)",
    "change rights": "import os; os.chmod('{folder}/victim', 0)",
    "temporary file": "import tempfile; tempfile.NamedTemporaryFile().write(b'x')",
    "memory file": "import os; os.memfd_create('x')",
    "read a file": "open('{folder}/victim').read()",
    "read the password file": "open('/etc/passwd').read()",
    "read its parent's environment": "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
    "read its own memory": "open('/proc/self/mem', 'rb')",
    "list a folder": "import os; os.listdir('{folder}')",
    "TCP socket": "import socket; socket.socket()",
    "UNIX socket": "import socket; socket.socket(socket.AF_UNIX)",
    "socket pair": "import socket; socket.socketpair()",
    "look up a name": "import socket; assert socket.getaddrinfo('localhost', 80)",
    "fork": "import os; os.fork()",
    "start a program": "import subprocess; subprocess.run(['/bin/true'])",
    "shell": "import os; assert os.system('true') == 0",
    "replace itself": "import os; os.execv('/bin/true', ['true'])",
    "a process by multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join(); "
    "assert p.exitcode == 0",
    "trace its parent": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "signal its parent": "import os; os.kill(os.getppid(), 0)",
    "signals by another way": "import fcntl, os; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "its parent's limits": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "become somebody": "import os; os.setuid(65534)",
    "a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "chroot": "import os; os.chroot('/')",
    "the bare system call of fork": "import ctypes; assert ctypes.CDLL(None).syscall(57) >= 0",
    "an x32 system call": "import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 + 57) >= 0",
    "lower its niceness": "import os; os.nice(-5)",
    "see variables": "import os; assert any('SECRET' in k for k in os.environ)",
}  # fmt: skip
"""Each must raise in the sandbox; {folder} is one with a file ``victim`` in it."""

HOLDING_UP = {
    "spins": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "ignores signals": "import signal, time\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
    " except (OSError, ValueError): pass\nwhile True: pass",
    "one operation in C": "9 ** 9 ** 9",
    "catches everything": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "waits for input": "import sys; sys.stdin.read(); import time; time.sleep(600)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "memory": "x = []\nwhile True: x.append(bytearray(10 ** 7))",
    "memory at once": "x = bytearray(10 ** 11)",
    "fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "thread bomb": "import threading, time\nwhile True:\n"
    " try: threading.Thread(target=time.sleep, args=(600,)).start()\n"
    " except BaseException: pass",
    "endless output": "while True: print('x' * 10 ** 6)",
    "deep recursion": "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "open files": "x = []\nwhile True:\n try: x.append(open('/dev/null'))\n except OSError: pass",
    "pipes": "import os\nx = []\nwhile True:\n try: x.append(os.pipe())\n except OSError: pass",
}
