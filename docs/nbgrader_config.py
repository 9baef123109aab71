"""How nbgrader takes the labs: put this file into the folder of your course. See
docs/teachers.md.

cp docs/nbgrader_config.py COURSE/
mkdir -p COURSE/source/lab2 && cp notebooks/02_fsdp_wrapping.ipynb COURSE/source/lab2/
cd COURSE && nbgrader generate_assignment lab2      # what learners get, in release/
nbgrader autograde lab2                             # what they handed in, in submitted/NAME/lab2/
"""

from nbgrader.converters.generate_assignment import GenerateAssignment
from nbgrader.preprocessors import ClearSolutions, NbGraderPreprocessor


class WithoutAnswers(NbGraderPreprocessor):
    """Removes the answers that a learner alone may open below each check."""

    def preprocess(self, notebook, resources):
        """The notebook without them."""
        notebook.cells = [
            cell
            for cell in notebook.cells
            if not cell.source.startswith("<details><summary>An answer")
        ]
        return notebook, resources


c = get_config()  # noqa: F821  (nbgrader gives it)
c.CourseDirectory.course_id = "labkit"
# The solutions are gone already; nbgrader's own step would put a stub in place of whole cells,
# heads of functions too.
steps = [step for step in GenerateAssignment.preprocessors.default() if step is not ClearSolutions]
c.GenerateAssignment.preprocessors = [WithoutAnswers, *steps]
c.Execute.timeout = 300  # seconds of a cell
